"""Registration of the device: the only action of `import djinn`.

The client, most of Djinn's code, is imported at the first use of the device.
"""

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
from djinn_core.registry.discovery import PluginCandidate, plugins_by_library
from djinn_core.settings import resolve
from djinn_core.system.gc_pause import collect_later, count_as_old
from djinn_core.system.interrupts import handle_interrupts, warn_without_lock
from djinn_core.system.processes import NoFork, in_forked_child

NATIVE: Final = "native"
_CLIENT = "djinn_client.runtime.client"
# otherwise a forked child would wait forever for the thread that imports the client
_IMPORTING: Final = NoFork(longest=20.0)

log = get_logger("djinn.client")


def attach() -> None:
    """Register the device with the client as its runtime. Called once, when a client imports `djinn`."""
    if _selected() == NATIVE:
        install()
    for library, candidates in plugins_by_library().items():
        call_on_import(library, partial(_integrate, candidates))
    handle_interrupts()
    warn_without_lock()
    port.sink = _SinkStub()  # type: ignore[assignment] # in its place
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
    """Return the name of the interception. An interception other than the native device begins with the client."""
    try:
        return resolve().settings.interception
    except DjinnError:  # the first use reports the error
        return NATIVE


def _load() -> None:
    """Import the client, which replaces the functions here as the runtime of the device."""
    with _IMPORTING, collect_later:  # each collection would scan all objects of PyTorch, up to 0.15 s
        from djinn_client.runtime import client

        count_as_old()
    if isinstance(port.sink, _SinkStub):
        client.become_runtime()
        for library, candidates in plugins_by_library().items():
            module = sys.modules.get(library)
            # libraries that were imported meanwhile; repeated integration does nothing
            if module is not None and not _is_importing(module):
                _integrate(candidates, module)


def _loading(name: str) -> Callable[..., Any]:
    """Return a stub for the runtime's function `name`.

    The stub imports the client, which replaces the stub, and calls the client's function.
    """

    def call(*arguments: Any) -> Any:
        _load()
        return getattr(port, name)(*arguments)

    return call


class _SinkStub:
    """Stub for the client's sink. It imports the client, which replaces the stub, and forwards calls to the client's sink."""

    def __getattr__(self, name: str) -> Any:
        _load()
        return getattr(port.sink, name)


def _is_importing(module: ModuleType) -> bool:
    """Return True while a thread imports `module`. `_integrate` is called at the end of the import."""
    return bool(getattr(module.__spec__, "_initializing", False))


def _loaded() -> ModuleType | None:
    """Return the client module if its import is complete, otherwise None."""
    client = sys.modules.get(_CLIENT)
    return client if hasattr(client, "become_runtime") else None  # defined last


def _integrate(candidates: Sequence[PluginCandidate], library: ModuleType) -> None:
    """Load the plugins that integrate with `library`, during or after its import."""
    del library
    if _CLIENT in sys.modules and _loaded() is None:
        return  # the client is being imported, and may itself import the library: `_load` calls this again
    with _IMPORTING, collect_later:
        from djinn_client.runtime import client, plugins  # noqa: F401 - the client becomes the runtime
        from djinn_client.runtime.context import context

    plugins.integrate_candidates(context, candidates)


def _after_fork() -> None:
    if early_start.process_start is not None:
        # These objects belong to the parent: finalizing them here would warn.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(early_start.process_start.executors))
        early_start.process_start.executors = ()
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
        if early_start.process_start is not None:
            early_start.process_start.end()
        if client is not None:
            client.shut_down()
    except DjinnError as error:
        log.debug("shutting down", reason=str(error))
    interpreter_shutdown.await_threads()
