"""Interface between interception and the runtime: defined here, implemented by the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from djinn_client.sink import Facts, Sink
from djinn_core.errors import StartupError
from djinn_core.system.interrupts import InterruptibleLock

if TYPE_CHECKING:
    from djinn_client.hookspecs.interception import Interception

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (func, args, kwargs) -> result


class _NotInstalled:
    """Placeholder of the sink and the interception before they are installed. Every use raises an error."""

    name = ""

    def __getattr__(self, _: str) -> Any:
        raise StartupError("remote_accelerator is not registered in this process: `import djinn` before using it")


class Port(Facts, eq=False):
    """The process's connection point between interception and the runtime.

    Attributes:
        sink: the runtime.
        lock: the sink's lock, which a forked child replaces.
        interception: the object that records ops.
    """

    sink: Sink = msgspec.field(default_factory=_NotInstalled)  # type: ignore[assignment] # in its place
    lock: InterruptibleLock = msgspec.field(default_factory=InterruptibleLock)
    interception: Interception = msgspec.field(default_factory=_NotInstalled)  # type: ignore[assignment] # as above


port = Port()
