"""Leases of an executor's sessions: reconnection of clients, and recovery of sessions from journals."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from djinn_core.errors import ProtocolError, QuotaExceeded, SessionLost, TransportError
from djinn_core.hookspecs.transports import Connection, Limits
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.reconnect_limit import STARTING_SECONDS
from djinn_core.wire.resume_messages import Resume
from djinn_server.disk_quota import DiskQuota
from djinn_server.handshake import refuse
from djinn_server.launch.executor_config import RecoveryConfig
from djinn_server.launch.tickets import Badge
from djinn_server.recovery.journal import Journal, journal_path
from djinn_server.recovery.journal_reader import JournalReader, owner_of
from djinn_server.recovery.leased_connection import LeasedConnection
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.recovery.unclaimed_journals import UnclaimedJournals
from djinn_server.usage_metrics import UsageMetrics

TRIES: Final = 3  # recoveries that may crash at the same frame, because an op may crash each executor
# Lifetime of a journal without an executor, in leases. A client notices a dead executor only at its next use of the device.
_UNCLAIMED_LEASES: Final = 20
_log = get_logger("djinn.server")


class CrashLoop(SessionLost):
    """A session has crashed every executor that tried to recover it."""


class Leases:
    """Sessions to which disconnected clients may reconnect, by name."""

    def __init__(self, config: RecoveryConfig, usage: UsageMetrics, disk: DiskQuota) -> None:
        self._config = config
        self._usage = usage
        self._disk = disk
        self._leased: dict[str, LeasedConnection] = {}
        self._lock = threading.Lock()
        self._unclaimed = (
            UnclaimedJournals(config.journals, _UNCLAIMED_LEASES * config.lease_seconds, disk)
            if config.journals
            else None
        )

    @property
    def seconds(self) -> float:
        """Seconds for which a session waits for a disconnected client; 0.0: the session ends with its connection."""
        return self._config.lease_seconds

    @property
    def patience(self) -> float:
        """Seconds that other executors wait for this one: the lease, plus a restart if `recoverable`; 0.0: no lease."""
        return self.seconds + (STARTING_SECONDS if self.recoverable else 0.0) if self.seconds else 0.0

    @property
    def recoverable(self) -> bool:
        """True if another process can recover the sessions of this process."""
        return self._config.journals is not None

    def journaled(self) -> tuple[int, int]:
        """Return the number of sessions with a journal, and the bytes of these journals."""
        with self._lock:
            journals = [channel.journal for channel in self._leased.values()]
        sizes = [journal.nbytes for journal in journals if journal.open]
        return len(sizes), sum(sizes)

    def next_lease_end(self) -> float | None:
        """Return the seconds until the next lease of a disconnected client ends; None if all clients are connected."""
        with self._lock:
            channels = list(self._leased.values())
        return min(
            (seconds for connection in channels if (seconds := connection.lease_seconds_left()) is not None),
            default=None,
        )

    def lease(self, owner: SessionIdentity, connection: Connection) -> LeasedConnection:
        """Register a session whose client may reconnect. Return the session's channel."""
        journal = None
        path = journal_path(self._config.journals, owner.session) if self._config.journals is not None else None
        if path is not None:
            try:
                config = self._config
                journal = Journal.begin(path, owner, config.journal_limit, self._disk, config.snapshot_seconds)
            except OSError as error:
                _log.warning(
                    "a session will not outlive its executor: no journal", session=owner.session, error=str(error)
                )
        channel = LeasedConnection(connection, self.seconds, self._usage, owner.secret, journal)
        with self._lock:
            self._leased[owner.session] = channel
        return channel

    def tick(self) -> None:
        """Remove journals that no client claimed within the lease. Call this about once a second."""
        if self._unclaimed is not None:
            self._unclaimed.scan_if_due()

    def assign_tenant(self, tenant: str) -> None:
        """Assign this executor to a tenant. The tenant's unclaimed journals then count towards its disk quota."""
        if self._unclaimed is not None:
            self._unclaimed.count_for(tenant)

    def recover(
        self, connection: Connection, request: Resume, assign: Callable[[Badge], str] = lambda _: ""
    ) -> tuple[SessionIdentity, LeasedConnection, int] | None:
        """Recover a dead executor's session from its journal. Return identity, channel, and number of received frames.

        Return None if there is no journal, this process has the session already, or the secret is wrong. `assign`:
        assigns the executor to the tenant and returns "", or returns why it refuses. The journal then remains.

        Raises:
            SessionLost: the journal is invalid, the session has ended, or its recovery crashed `TRIES` processes.
            OSError: the journal cannot be opened, or another executor uses it.
            QuotaExceeded: `assign` refused the recovery.
        """
        path = journal_path(self._config.journals, request.session) if self._config.journals is not None else None
        with self._lock:
            if path is None or request.session in self._leased or not path.exists():
                return None
            if not hmac.compare_digest(owner_of(path).secret, request.secret):
                return None
            past = JournalReader(path)
            try:
                if reason := assign(past.owner.badge):
                    raise QuotaExceeded(reason)
                channel = self._continue(connection, path, past, request.received)
            except BaseException:
                past.close()
                raise
            self._leased[request.session] = channel
            if self._unclaimed is not None:
                self._unclaimed.claim(path)
        return past.owner, channel, past.taken

    def _continue(
        self, connection: Connection, path: Path, past: JournalReader, received_count: int
    ) -> LeasedConnection:
        """Return the channel that replays a journal. `received_count`: number of replies that the client has received."""
        # `Journal.resume` locks the journal, so that no other process uses it.
        config = self._config
        journal = Journal.resume(path, past, config.journal_limit, self._disk, config.snapshot_seconds)
        try:
            if not past.is_at(path):
                if journal.nbytes:
                    raise BlockingIOError(f"another executor has written to {path} since this executor read it")
                journal.close()  # `Journal.resume` has created a new file
                raise SessionLost("the session ended while its journal was read")
            if past.tried >= TRIES:
                journal.close()
                raise CrashLoop(
                    f"recovery of this session crashed {past.tried + 1} executors in a row. The server's log names the op: start a new session"
                )
            connection.limits = Limits()
            journal.begin_replay()
            channel = LeasedConnection(connection, self.seconds, self._usage, past.owner.secret, journal)
            channel.replay(received_count)
        except BaseException:
            journal.leave()
            raise
        return channel

    def end(self, session: str) -> None:
        """Remove the lease of an ended session, and close its connection."""
        with self._lock:
            channel = self._leased.pop(session, None)
        if channel is not None:
            channel.close()

    def serve(self, connection: Connection, request: Resume, on_resume: Callable[[], None] = lambda: None) -> bool:
        """Resume a session over a connection. A wrong secret gets the same reply as an unknown session.

        `on_resume`: called on success. Return True if the session has taken over the connection.
        """
        channel = self._with_secret(request.session, request.secret)
        if channel is None:
            _log.warning("refused to resume an unknown session", session=request.session)
            refuse(connection, "there is no such session (any more)")
            return False
        connection.limits = Limits()
        try:
            channel.resume(connection, request.received, on_resume)
        except ProtocolError as error:
            _log.warning("refused to resume a session after a protocol error", error=str(error))
            refuse(connection, str(error))
        except TransportError as error:
            _log.info("a client disconnected while it resumed its session", session=request.session, error=str(error))
        else:
            return True
        return False

    def knows(self, session: str, secret: str) -> bool:
        """Return True if this executor has the session and the secret is right."""
        return self._with_secret(session, secret) is not None

    def _with_secret(self, session: str, secret: str) -> LeasedConnection | None:
        """Return the channel if the secret is right, else None. The duration does not reveal if the session exists."""
        with self._lock:
            channel = self._leased.get(session)
        expected_secret = channel.secret if channel is not None else secrets.token_urlsafe(32)
        return channel if hmac.compare_digest(expected_secret, secret) else None

    def expire(self) -> None:
        """End all leases, so that no client may reconnect."""
        with self._lock:
            channels = list(self._leased.values())
        for connection in channels:
            connection.expire()
