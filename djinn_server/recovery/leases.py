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

TRIES: Final = 3  # to recover a session at the same frame: an op that crashes its executor crashes the next one, too
# A program that computes elsewhere notices that its executor died only when it uses the device next.
_UNCLAIMED_LEASES: Final = 20  # for which a journal waits for its client
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
        """Seconds for which a session waits for its client; 0.0: the session ends with its connection."""
        return self._config.lease_seconds

    @property
    def patience(self) -> float:
        """Seconds for which other executors may wait for this executor, including a restart."""
        return self.seconds + (STARTING_SECONDS if self.recoverable else 0.0) if self.seconds else 0.0

    @property
    def recoverable(self) -> bool:
        """True if another process can recover the sessions of this process."""
        return self._config.journals is not None

    def journaled(self) -> tuple[int, int]:
        """Return the number of sessions with a journal, and the bytes of these journals."""
        with self._lock:
            journals = [leased.journal for leased in self._leased.values()]
        sizes = [journal.nbytes for journal in journals if journal.open]
        return len(sizes), sum(sizes)

    def next_lease_end(self) -> float | None:
        """Return the seconds until the next lease of a disconnected client ends; None if all clients are connected."""
        with self._lock:
            leased = list(self._leased.values())
        return min(
            (seconds for connection in leased if (seconds := connection.lease_seconds_left()) is not None), default=None
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
        leased = LeasedConnection(connection, self.seconds, self._usage, owner.secret, journal)
        with self._lock:
            self._leased[owner.session] = leased
        return leased

    def tick(self) -> None:
        """Remove journals that no client claimed within the lease. Call this about once a second."""
        if self._unclaimed is not None:
            self._unclaimed.scan_if_due()

    def assign_tenant(self, tenant: str) -> None:
        """Assign this executor to a tenant. The tenant's unclaimed journals then count towards its disk quota."""
        if self._unclaimed is not None:
            self._unclaimed.count_for(tenant)

    def recover(
        self, connection: Connection, asked: Resume, assign: Callable[[Badge], str] = lambda _: ""
    ) -> tuple[SessionIdentity, LeasedConnection, int] | None:
        """Recover a session of a dead executor from its journal. Return its identity, channel and number of frames.

        Return None if there is no journal, or the secret is wrong. `assign` assigns the executor to the tenant. It returns
        "" or the reason why recovery is not allowed now; the journal is then kept.

        Raises:
            SessionLost: the journal cannot be read.
            OSError: the journal cannot be opened, or another executor uses it.
            QuotaExceeded: `assign` refused the recovery.
        """
        path = journal_path(self._config.journals, asked.session) if self._config.journals is not None else None
        with self._lock:
            if path is None or asked.session in self._leased or not path.exists():
                return None
            if not hmac.compare_digest(owner_of(path).secret, asked.secret):
                return None
            past = JournalReader(path)
            try:
                if reason := assign(past.owner.badge):
                    raise QuotaExceeded(reason)
                leased = self._continue(connection, path, past, asked.received)
            except BaseException:
                past.close()
                raise
            self._leased[asked.session] = leased
            if self._unclaimed is not None:
                self._unclaimed.claim(path)
        return past.owner, leased, past.taken

    def _continue(self, connection: Connection, path: Path, past: JournalReader, taken: int) -> LeasedConnection:
        """Return the channel that replays a journal. `taken`: number of replies that the client has received."""
        # from here on no other process uses it
        config = self._config
        journal = Journal.resume(path, past, config.journal_limit, self._disk, config.snapshot_seconds)
        try:
            if not past.is_at(path):
                if journal.nbytes:
                    raise BlockingIOError(f"another executor has written to {path} since this executor read it")
                journal.close()  # which made it anew
                raise SessionLost("the session has ended meanwhile")
            if past.tried >= TRIES:
                journal.close()
                raise CrashLoop(
                    f"recovery of this session crashed {past.tried + 1} executors in a row; see the server's log for the op, and start a new session"
                )
            connection.limits = Limits()
            journal.begin_replay()
            leased = LeasedConnection(connection, self.seconds, self._usage, past.owner.secret, journal)
            leased.replay(taken)
        except BaseException:
            journal.leave()
            raise
        return leased

    def end(self, session: str) -> None:
        """Remove the lease of an ended session, and close its connection."""
        with self._lock:
            leased = self._leased.pop(session, None)
        if leased is not None:
            leased.close()

    def serve(self, connection: Connection, asked: Resume, resumed: Callable[[], None] = lambda: None) -> bool:
        """Resume a session over a connection. A wrong secret gets the same answer as an unknown session.

        `resumed`: called on success. Return True if the session has taken the connection over.
        """
        leased = self._with_secret(asked.session, asked.secret)
        if leased is None:
            _log.warning("refused to resume an unknown session", session=asked.session)
            refuse(connection, "there is no such session (any more)")
            return False
        connection.limits = Limits()
        try:
            leased.resume(connection, asked.received, resumed)
        except ProtocolError as error:
            _log.warning("refused to resume a session after a protocol error", error=str(error))
            refuse(connection, str(error))
        except TransportError as error:
            _log.info("a client disconnected while it resumed its session", session=asked.session, error=str(error))
        else:
            return True
        return False

    def knows(self, session: str, secret: str) -> bool:
        """Return True if this executor has the session and the secret is right."""
        return self._with_secret(session, secret) is not None

    def _with_secret(self, session: str, secret: str) -> LeasedConnection | None:
        """Return the session if the secret is right, else None. The time does not tell whether the session exists."""
        with self._lock:
            leased = self._leased.get(session)
        expected = leased.secret if leased is not None else secrets.token_urlsafe(32)
        return leased if hmac.compare_digest(expected, secret) else None

    def expire(self) -> None:
        """End all leases: no client may reconnect any more."""
        with self._lock:
            leased = list(self._leased.values())
        for connection in leased:
            connection.expire()
