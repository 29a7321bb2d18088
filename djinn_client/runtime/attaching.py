"""Registration of the device, which is all that `import djinn` does. The client, most of Djinn's code, is imported when the device is first used."""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from djinn_client.interception import interpreter_shutdown
from djinn_client.interception.install import install
from djinn_client.interception.on_import import call_on_import
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import early_start
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.registry.discovery import PluginCandidate, integrating
from djinn_core.settings import resolve
from djinn_core.system.gc_pause import collect_later, count_as_old
from djinn_core.system.interrupts import handle_interrupts, warn_without_lock
from djinn_core.system.processes import NoFork, in_forked_child

NATIVE: Final = "native"
_CLIENT = "djinn_client.runtime.client"
_IMPORTING: Final = NoFork(longest=20.0)  # a child would wait for ever for the thread that imports the client

log = get_logger("djinn.client")


def attach() -> None:
    """Register the device, whose runtime is the client; called once, when `djinn` is imported by a client."""
    if _selected() == NATIVE:
        install()
    for library, candidates in integrating().items():
        call_on_import(library, partial(_integrate, candidates))
    handle_interrupts()
    warn_without_lock()
    port.sink = _LateSink()  # type: ignore[assignment] # in its place
    for name in (
        "is_available",
        "prepare",
        "device_count",
        "counts_when_open",
        "describe",
        "residence",
        "op_handler",
        "operators",
    ):
        setattr(port, name, _loading(name))
    _IMPORTING.register()
    in_forked_child(_after_fork)
    atexit.register(_at_exit)


def _selected() -> str:
    """Name of the interception; another one than the native device begins with the client."""
    try:
        return resolve().settings.interception
    except DjinnError:  # the first use says what is wrong
        return NATIVE


def _load() -> None:
    """Import the client, which becomes the runtime of the device in place of the functions here."""
    with _IMPORTING, collect_later:  # each collection would look at all that PyTorch has made, up to 0.15 s
        from djinn_client.runtime import client

        count_as_old()
    if isinstance(port.sink, _LateSink):
        client.become_runtime()
        for library, candidates in integrating().items():
            module = sys.modules.get(library)
            if module is not None and not _begun(module):  # imported meanwhile; integrating once more does nothing
                _integrate(candidates, module)


def _loading(name: str) -> Callable[..., Any]:
    """Stand-in for the runtime's function `name`: it imports the client, which takes its place, and calls the client's."""

    def call(*arguments: Any) -> Any:
        _load()
        return getattr(port, name)(*arguments)

    return call


class _LateSink:
    """In the place of the client's sink: imports the client, which puts its own here, and calls that."""

    def __getattr__(self, name: str) -> Any:
        _load()
        return getattr(port.sink, name)


def _begun(module: ModuleType) -> bool:
    """True while a thread imports `module`, at whose end `_integrate` is called."""
    return bool(getattr(module.__spec__, "_initializing", False))


def _loaded() -> ModuleType | None:
    """The client, if it was imported. While a thread imports it, there is none: nor is there a session."""
    client = sys.modules.get(_CLIENT)
    return client if hasattr(client, "become_runtime") else None  # defined last


def _integrate(candidates: Sequence[PluginCandidate], library: ModuleType) -> None:
    """Load the plugins that name `library`, which is being imported, or was."""
    del library
    if _CLIENT in sys.modules and _loaded() is None:
        return  # the client is being imported, and may import the library itself: `_load` comes back to it
    with _IMPORTING, collect_later:
        from djinn_client.runtime import client, plugins  # noqa: F401 - the client becomes the runtime
        from djinn_client.runtime.context import context

    plugins.integrate_candidates(context, candidates)


def _after_fork() -> None:
    if early_start.begun is not None:
        # They are the parent's: finalizing them here would warn.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(early_start.begun.executors))
        early_start.begun.executors = ()
    client = _loaded()
    # Tensors of unsent programs belong to the parent. Without a session and without such tensors, the child may use the device.
    has_session = client is not None and client.context.session is not None
    port.forked = port.forked or has_session or (recorders.begun and recorders.have_unsent_values())
    if client is not None:
        client.after_fork()
    if recorders.begun:
        recorders.forget_everything()


def _at_exit() -> None:
    interpreter_shutdown.begin()
    client = _loaded()
    try:
        if early_start.begun is not None:
            early_start.begun.end()
        if client is not None:
            client.shut_down()
    except DjinnError as error:
        log.debug("shutting down", reason=str(error))
    interpreter_shutdown.settle()
