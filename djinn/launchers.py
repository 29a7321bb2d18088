"""For authors of launchers: processes on this machine, and executors that are held behind a command or by an engine."""

from __future__ import annotations

from djinn_core.errors import StartupError
from djinn_core.hookspecs.launchers import (
    ExecutorOptions,
    Launched,
    Launcher,
    LaunchWish,
    NoticedLaunched,
)
from djinn_core.logs import get_logger
from djinn_core.registry.version import djinn_version
from djinn_server.launch.held_executor import HeldExecutor, HolderCalls
from djinn_server.launch.holder import ExecutorHolder
from djinn_server.launch.launchers import LocalLauncher
from djinn_server.launch.piped_calls import PipedCalls
from djinn_server.launch.piped_holder import holder_command

__all__ = [
    "ExecutorHolder",
    "ExecutorOptions",
    "HeldExecutor",
    "HolderCalls",
    "LaunchWish",
    "Launched",
    "Launcher",
    "LocalLauncher",
    "NoticedLaunched",
    "PipedCalls",
    "StartupError",
    "djinn_version",
    "get_logger",
    "holder_command",
]
