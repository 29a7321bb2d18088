"""Registration of the device, which is all that `import djinn` does. The client, most of Djinn's code, is imported when the device is first used."""

from __future__ import annotations

import atexit
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Final

from djinn_core.config import resolve
from djinn_core.errors import DjinnError
from djinn_core.interception import interpreter_shutdown
from djinn_core.interception.install import install
from djinn_core.interception.libraries.on_import import call_on_import
from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.interception.recording.recorder import recorders
from djinn_core.interception.runtime_interface import Runtime, port
from djinn_core.interrupts import handle_interrupts, warn_without_lock
from djinn_core.logs import get_logger
from djinn_core.plugins.discovery import RUN, PluginCandidate, integrating
from djinn_core.system.processes import NoFork, in_forked_child

if TYPE_CHECKING:
    from djinn_core.wire.messages import DeviceInfo

_CLIENT = "djinn_core.runtime.client"
_IMPORTING: Final = NoFork(longest=20.0)  # a child would wait for ever for the thread that imports the client

log = get_logger("djinn.client")


def attach() -> None:
    """Register the device, whose runtime is the client; called once, when `djinn` is imported by a client."""
    install()
    for library, candidates in integrating().items():
        if library != RUN:
            call_on_import(library, partial(_integrate, candidates))
    handle_interrupts()
    warn_without_lock()
    port.start = _start
    port.is_available = _is_available
    port.prepare = _prepare
    port.describe = _describe
    port.device_count = _device_count
    port.counts_when_open = _counts_when_open
    _IMPORTING.register()
    in_forked_child(_after_fork)
    atexit.register(_at_exit)
    if _starts_at_import():
        _load()
        from djinn_core.runtime import client

        client.start_early()


def _load() -> None:
    """Import the client, which becomes the runtime of the device in place of the functions here."""
    with _IMPORTING, collect_later:  # each collection would look at all that PyTorch has made, up to 0.15 s
        from djinn_core.runtime import client
    if port.start is _start:
        client.become_runtime()


def _loaded() -> ModuleType | None:
    """The client, if it was imported. While a thread imports it, there is none: nor is there a session."""
    client = sys.modules.get(_CLIENT)
    return client if hasattr(client, "become_runtime") else None  # defined last


def _start() -> Runtime:
    _load()
    return port.runtime()


def _is_available() -> bool:
    _load()
    return port.is_available()


def _prepare() -> None:
    _load()
    port.prepare()


def _describe(index: int) -> tuple[str, DeviceInfo]:
    _load()
    return port.describe(index)


def _device_count() -> int:
    _load()
    return port.device_count()


def _counts_when_open() -> bool:
    _load()
    return port.counts_when_open()


def _integrate(candidates: Sequence[PluginCandidate], library: ModuleType) -> None:
    """Load the plugins that name `library`, which is being imported, or was."""
    del library
    with _IMPORTING, collect_later:
        from djinn_core.runtime import client, integrations

    integrations.integrate_candidates(client.context, candidates)


def _after_fork() -> None:
    client = _loaded()
    if client is not None:
        client.after_fork()
    recorders.forget_everything()


def _at_exit() -> None:
    interpreter_shutdown.begin()
    client = _loaded()
    try:
        if client is not None:
            client.shut_down()
    except DjinnError as error:
        log.debug("shutting down", reason=str(error))
    interpreter_shutdown.settle()


def _starts_at_import() -> bool:
    """True if the setting says so, and this is no worker process of a program that has imported Djinn before."""
    if multiprocessing.current_process().name != "MainProcess":  # set before a spawned worker imports the program
        return False
    try:
        return resolve().settings.start_at_import
    except DjinnError:
        return False  # the first use says what is wrong
