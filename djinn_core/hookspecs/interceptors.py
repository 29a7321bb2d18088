"""Stage 1, interception: how PyTorch programs become recorded instructions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from djinn_core.hookspecs import hookspec


@runtime_checkable
class Interceptor(Protocol):
    """A way to record what PyTorch code does on the remote device."""

    name: str

    def install(self) -> None:
        """Start intercepting. Called before the first program is recorded, and again after `uninstall`."""

    def uninstall(self) -> None:
        """Stop intercepting; values that exist stay usable. Called where the plugin is configured away."""


@hookspec
def djinn_register_interceptors(settings: Any) -> Iterable[Interceptor]:
    """Return the interceptors that this plugin offers.

    Called once in the client process, when the plugins are first needed or configured again. All interceptors are
    installed in order of name. An exception disables the plugin and is reported by `djinn plugins`. Since API version 1.
    """
    del settings
    raise NotImplementedError
