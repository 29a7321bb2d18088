"""The audit log of connections and refusals: one JSON object a line, without secrets."""

from __future__ import annotations

import datetime as dt
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.logs import get_logger, redact
from djinn_core.server.gateway.log_rate_limit import Sparing

_log = get_logger("djinn.server")


class Audit:
    """Writes to a file that only its owner can read, or nowhere; the server's log says the same."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises `ConfigurationError` where the file cannot be written."""
        self._path = path
        self._lock = threading.Lock()
        self._file = -1 if path is None else _open(path)
        self._sparing = Sparing()

    def note(self, event: str, **facts: Any) -> None:
        """Write one line: `event` is one of `admitted`, `refused`, `status`, `evicted`, `killed`, `started`, `stopped`.

        Of many refusals for the same reason some are left out, and the next line says how many.
        """
        if event == "refused":
            left_out = self._sparing.count(f"{facts.get('why')} {facts.get('tenant', '')}")
            if left_out is None:
                return
            if left_out:
                facts["left_out"] = left_out
        level = _log.warning if event == "refused" else _log.info
        level(f"audit: {event}", **facts)
        if self._file < 0:
            return
        clean = redact(None, event, {"time": dt.datetime.now(dt.UTC).isoformat(), "audit": event, **facts})
        line = msgspec.json.encode(clean) + b"\n"
        try:
            with self._lock:
                self._reopen_if_moved()
                os.write(self._file, line)  # one write: lines of several processes do not mix
        except OSError as error:
            _log.error("the audit log cannot be written", path=str(self._path), error=str(error))

    def _reopen_if_moved(self) -> None:
        """Reopen the log file where another process (logrotate) has moved it away."""
        assert self._path is not None
        try:
            moved = self._path.stat().st_ino != os.fstat(self._file).st_ino
        except FileNotFoundError:
            moved = True
        if moved:
            os.close(self._file)
            self._file = _open(self._path)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot write the audit log {path}: {error.strerror or error}") from error
