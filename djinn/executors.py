"""For authors of engines: the contract, the holder of an executor, and handles of executors behind a command and on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import importing
from djinn_core.errors import StartupError
from djinn_core.hookspecs.executors import (
    ExecutorEngine,
    ExecutorHandle,
    ExecutorOptions,
    LaunchRequest,
)
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version

# Of the server, which a machine of a client need not have.
if TYPE_CHECKING:
    from djinn_server.launch.engines import LocalEngine
    from djinn_server.launch.holder import ExecutorHolder
    from djinn_server.launch.piped_handle import PipedHandle
    from djinn_server.launch.piped_holder import holder_command

__all__ = [
    "ExecutorEngine",
    "ExecutorHandle",
    "ExecutorHolder",
    "ExecutorOptions",
    "LaunchRequest",
    "LocalEngine",
    "PipedHandle",
    "StartupError",
    "djinn_version",
    "get_logger",
    "holder_command",
]

_PLACES = {
    "djinn_server.launch.holder": "ExecutorHolder",
    "djinn_server.launch.engines": "LocalEngine",
    "djinn_server.launch.piped_handle": "PipedHandle",
    "djinn_server.launch.piped_holder": "holder_command",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _PLACES)
