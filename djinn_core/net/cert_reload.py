"""Certificates that are renewed while a server runs: who connects from then on sees the new one, and connections that there are go on."""

from __future__ import annotations

import ssl
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from djinn_core.errors import ConfigurationError
from djinn_core.files import FileVersion, version_of
from djinn_core.logs import get_logger

PAUSE_SECONDS: Final = 2.0
_log = get_logger("djinn.transport")

# Puts a certificate and its key into a context; raises `ConfigurationError` where they cannot be used.
Load = Callable[[ssl.SSLContext], None]


class CertificateRenewal:
    """Reads the certificate of one TLS context again when its files have changed, for as long as the context is referenced."""

    def __init__(self, context: ssl.SSLContext, files: tuple[Path, ...], load: Load) -> None:
        """`load`: puts the certificate into the context; it must not refer to the context."""
        self._context = weakref.ref(context)
        self._files = files
        self._load = load
        self._versions = _versions(files)

    def start(self) -> None:
        """Look again and again, in a thread that ends with the context."""
        threading.Thread(target=self._run, name="djinn-certificates", daemon=True).start()

    def look(self) -> bool:
        """Load what has changed; whether the context is still there.

        What cannot be used changes nothing, and is tried again when it changes.
        """
        context = self._context()
        if context is None:
            return False
        now = _versions(self._files)
        if not now or now == self._versions:
            return True
        self._versions = now
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair must not get into the one that is used
            self._load(context)
        except ConfigurationError as error:
            _log.error("a certificate was changed and cannot be used; the one before is shown", error=str(error))
        else:
            _log.info("a certificate was read again", files=[str(file) for file in self._files])
        return True

    def _run(self) -> None:
        while self.look():
            time.sleep(PAUSE_SECONDS)


def _versions(files: tuple[Path, ...]) -> tuple[FileVersion, ...]:
    """Versions of the files; empty if one is missing, as while it is replaced."""
    try:
        return tuple([version_of(file) for file in files])
    except OSError:
        return ()
