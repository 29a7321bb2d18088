"""Audit log of connections and refusals: one JSON object per line, without secrets."""

from __future__ import annotations

import datetime as dt
import io
import logging
import sys
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.observers import Event, Observer
from djinn_core.logs import get_logger, redact
from djinn_core.system.shared_files import open_privately
from djinn_server.rate_limit import LogRateLimit

EVENTS: Final = frozenset({"admitted", "refused", "status", "evicted", "killed", "started", "stopped"})
BUSY_SECONDS: Final = 30.0  # between log lines about refusals of one client because the server is full
_log = get_logger("djinn.server")


class Audit(Observer):
    """An observer that writes security events to the server's log, and to an audit file if there is one.

    Only the owner can read the file. If another process such as logrotate moves the file away, it is created again.
    """

    name = "audit"
    events = EVENTS

    def __init__(self, path: Path | None = None) -> None:
        """Open the file at `path`; None: write only the log. Raises `ConfigurationError` if it cannot be written."""
        self._log_limit = LogRateLimit()
        self._busy_limit = LogRateLimit(burst=1, rate=1 / BUSY_SECONDS)
        try:
            self._file = None if path is None else _AuditFile(path)
        except OSError as error:
            raise ConfigurationError(f"cannot write the audit log {path}: {error.strerror or error}") from error

    def observe(self, event: Event) -> None:
        """Write one line for each event in `EVENTS`.

        Of many refusals for the same reason, some are skipped. The next line has the number of skipped lines.
        """
        if event.name not in EVENTS:
            return
        facts = dict(event.fields)
        if event.name == "refused":
            # A client of a full server retries every few seconds.
            limit, client = (
                (self._busy_limit, facts.get("client")) if facts.get("why") == "busy" else (self._log_limit, "")
            )
            skipped = limit.count(f"{facts.get('why')} {facts.get('tenant', '')} {client}")
            if skipped is None:
                return
            if skipped:
                facts["left_out"] = skipped
        level = _log.warning if event.name == "refused" else _log.info
        level(f"audit: {event.name}", **facts)
        if self._file is None:
            return
        time = dt.datetime.fromtimestamp(event.seconds, dt.UTC).isoformat()
        clean = redact(None, event.name, {"time": time, "audit": event.name, **facts})
        self._file.handle(logging.makeLogRecord({"msg": msgspec.json.encode(clean).decode()}))

    def close(self) -> None:
        """Stop writing to the file."""
        if self._file is not None:
            self._file.close()


class _AuditFile(WatchedFileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, as `logging.Handler.emit` does. If the file cannot be opened again, log an error."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging calls it so
        """Log the error, because auditing must not end the audited action."""
        del record
        _log.error("the audit log cannot be written", path=self.baseFilename, error=str(sys.exception()))

    def _open(self) -> io.TextIOWrapper:
        path = Path(self.baseFilename)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open(path, "a", encoding="utf-8", opener=open_privately)
