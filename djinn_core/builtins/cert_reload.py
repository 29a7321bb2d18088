"""Certificates that are renewed while a server runs: who connects from then on sees the new one, and connections that there are go on."""

from __future__ import annotations

import ssl
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.files import FileVersion, version_of
from djinn_core.logs import get_logger

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.transport")

# Puts a certificate and its key into a context; raises `ConfigurationError` where they cannot be used.
Load = Callable[[ssl.SSLContext], None]


@attrs.define
class _Shown:
    files: tuple[Path, ...]
    load: Load
    versions: tuple[FileVersion, ...]


_shown: weakref.WeakKeyDictionary[ssl.SSLContext, _Shown] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def renew(context: ssl.SSLContext, files: tuple[Path, ...], load: Load) -> None:
    """Have `load` called for a context again when one of its files has changed, for as long as it is referenced."""
    global _thread
    with _lock:
        _shown[context] = _Shown(files, load, _versions(files))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="djinn-certificates", daemon=True)
            _thread.start()


def look() -> None:
    """Once: load what has changed. What cannot be used changes nothing, and is tried again when it changes."""
    with _lock:
        due = list(_shown.items())
    while due:
        context, shown = due.pop()
        now = _versions(shown.files)
        if not now or now == shown.versions:
            continue
        shown.versions = now
        try:
            shown.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair must not get into the one that is used
            shown.load(context)
        except ConfigurationError as error:
            _log.error("a certificate was changed and cannot be used; the one before is shown", error=str(error))
        else:
            _log.info("a certificate was read again", files=[str(file) for file in shown.files])


def _versions(files: tuple[Path, ...]) -> tuple[FileVersion, ...]:
    """Versions of the files; empty where one is missing, as while it is replaced."""
    try:
        return tuple([version_of(file) for file in files])
    except OSError:
        return ()


def _run() -> None:
    while True:
        time.sleep(PAUSE_SECONDS)
        look()
