"""Session leases at the executor: a session whose connection broke waits for its client until the lease expires."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from djinn_core.errors import ProtocolError, QuotaExceeded, SessionLost, TransportError
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.reconnect_limit import STARTING_SECONDS
from djinn_core.protocol.delivery.reliable_connection import NotReconnected, ReliableConnection
from djinn_core.protocol.delivery.snapshot_schedule import SNAPSHOT_SECONDS, SnapshotSchedule, reply_checksum
from djinn_core.wire import limits
from djinn_core.wire.messages import Goodbye, is_of_kind
from djinn_core.wire.resume_messages import Resume, Resumed
from djinn_server.disk_quota import DiskQuota
from djinn_server.handshake import instance, refuse, send_message
from djinn_server.launch.executor_config import RecoveryConfig
from djinn_server.launch.tickets import Badge
from djinn_server.recovery.blob_files import BlobFiles, contents_folder
from djinn_server.recovery.executor_channel import ExecutorChannel, StateParts
from djinn_server.recovery.journal import (
    FRAME,
    NOTE,
    Journal,
    JournalReader,
    SessionIdentity,
    SnapshotHeader,
    journal_path,
    owner_of,
    remove_stale,
)
from djinn_server.usage_metrics import UsageMetrics

TRIES: Final = 3  # to recover a session at the same frame: an op that crashes its executor crashes the next one, too
SWEEP_SECONDS: Final = 60.0
_CROWDED_SECONDS: Final = 1.0  # at least between snapshots, if a journal has reached half of its limit
_SHOWN: Final = 40  # bytes of a decision, in messages
_ROUNDED: Final = b"rounded"  # in place of a checksum
_log = get_logger("djinn.server")


class CrashLoop(SessionLost):
    """A session has crashed every executor that tried to recover it."""


class LeasedConnection(ReliableConnection, ExecutorChannel):
    """Implements `ExecutorChannel` for a client that may reconnect with a secret that it was told at the beginning."""

    def __init__(
        self,
        inner: Connection,
        seconds: float,
        usage: UsageMetrics,
        secret: str = "",
        journal: Journal | None = None,
        every: float = SNAPSHOT_SECONDS,
    ) -> None:
        """`seconds`: how long the client may stay away. `usage`: counts how often it came back.

        `journal`: records what the session receives, if recovery is on; `every`: shortest time between two snapshots, in seconds.
        """
        super().__init__(inner)
        self._usage = usage
        self.secret = secret or secrets.token_urlsafe(32)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._changed: Callable[[], None] = lambda: None
        self._client_left = False
        self._missed: Connection | None = None  # the connection that broke last
        self._missed_at = 0.0
        self._journal = journal
        self._journaled = journal is not None
        self._past: JournalReader | None = None
        self._recovered = False
        self._schedule = SnapshotSchedule(every, _CROWDED_SECONDS)

    def journal_bytes(self) -> int | None:
        """Bytes of its journal; None if it has none, or that was abandoned."""
        journal = self._journal
        return journal.nbytes if journal is not None and journal.open else None

    def repeat(self, past: JournalReader, taken: int) -> None:
        """Replay the journal `past`; the client has already received `taken` of its replies."""
        self._past = self._replay = past
        if past.over:
            self._note_recovery()
        self._inbox.take(past.taken)
        if past.base is not None:
            self._outbox.restore(past.base.sent, past.kept())
        self._outbox.repeat(taken)

    def _note_recovery(self) -> None:
        self._recovered = True
        if self._journal is not None:
            self._journal.recovered()

    @property
    def recovery_state(self) -> tuple[Journal | None, JournalReader | None]:
        """As `ExecutorChannel.recovery_state`."""
        return self._journal, self._past

    def snapshot_if_due(self, state: Callable[[], StateParts | None], still: AbstractContextManager[object]) -> None:
        """Called between two frames: if a snapshot is due (`SnapshotSchedule`), replace the journal by a snapshot of `state()`.

        `still`: a lock held meanwhile, so that no other thread journals what the state has. The pause between two snapshots is at
        least `snapshot_schedule.PAUSE_FACTOR` times what the first one took.
        """
        journal, started = self._journal, time.monotonic()
        schedule = self._schedule
        if self._past is not None and self._past.over and not self._recovered:
            self._note_recovery()
        if journal is None or started < schedule.due_if_large:
            return
        if started < schedule.due and not journal.is_half_full:
            return
        if self._early or (self._past is not None and not self._past.over):
            return
        done = self._compact(journal, state, still)
        self._schedule.taken(started, failed=done is False)

    def put_aside(
        self, state: Callable[[], StateParts | None], still: AbstractContextManager[object]
    ) -> JournalReader | None:
        """As `ExecutorChannel.put_aside`."""
        journal = self._journal
        if journal is None or self._early or (self._past is not None and not self._past.over):
            return None
        if not self._compact(journal, state, still):
            return None
        reader = JournalReader(journal.path)
        reader.map_files()  # a journal that is given up while the session is idle must not take its values along
        return reader

    def _compact(
        self, journal: Journal, state: Callable[[], StateParts | None], still: AbstractContextManager[object]
    ) -> bool | None:
        """Replace the journal by a snapshot of `state()`. Returns as `Journal.compact`; None if the session has no state to save now."""
        with self._reading, still:  # no other thread reads ahead meanwhile
            taken = state() if journal.open and not self._early else None
            if taken is None:
                return None
            with self._sending, self._keeping:
                base = SnapshotHeader(self._inbox.received, self._outbox.sent, taken[0])
                kept = [frame for _, frame in self._outbox.kept()]
            done = journal.compact(base, taken[1], kept, taken[2])
        if done:
            self._usage.count("journal_snapshots")
        if done and self._past is not None:  # it holds the file that was there before
            self._past.close()
            self._past = self._replay = None
        return done

    def send(self, frame: Frame) -> None:
        """As `ReliableConnection.send`. On replay, fetched values must have the checksum recorded in the journal.

        Raises:
            SessionLost: they have another one.
        """
        if self._client_left:
            return
        if frame.body and self._journal is not None:
            if self._past is None:
                self._journal.append(NOTE, b"%d" % reply_checksum(frame.body), ())
            else:
                self.decide(lambda before: before if before == _ROUNDED else b"%d" % reply_checksum(frame.body))
        super().send(frame)

    def send_rounded(self, frame: Frame) -> None:
        """As `ExecutorChannel.send_rounded`."""
        if self._client_left:
            return
        if frame.body and self._journal is not None:
            if self._past is None:
                self._journal.append(NOTE, _ROUNDED, ())
            else:
                self.decide(lambda before: before or _ROUNDED)
        super().send(frame)

    def send_unchecked(self, frame: Frame) -> None:
        """As `ExecutorChannel.send_unchecked`; on replay, the number of frames must be the same."""
        if not self._client_left:
            super().send(frame)

    def decide(self, decision: Callable[[bytes | None], bytes]) -> bytes:
        """As `ExecutorChannel.decide`."""
        before = self._past.next_note() if self._past is not None else None
        now = decision(before)
        if before is None and self._journal is not None:
            self._journal.note(now)
        elif before is not None and now != before:
            found = f"{before[:_SHOWN]!r}, and now {now[:_SHOWN]!r}"
            raise SessionLost(f"what the executor computed before it died comes out differently now: it was {found}")
        return now

    def resend(self) -> None:
        """As `ExecutorChannel.resend`."""
        self._retransmit(self._inner)

    def _accept(self, frame: Frame) -> Frame:
        journal = self._journal
        if journal is None:
            return frame
        if frame.body:
            return journal.frame(frame)
        journal.append(FRAME, frame.head, ())
        return frame

    def read_ahead(self, frames: int, nbytes: int) -> None:
        """As `ReliableConnection.read_ahead`; nothing during a replay."""
        if self._past is None or self._past.over:
            inner = self._inner
            try:
                super().read_ahead(frames, nbytes)
            except TransportError as error:
                self._note_break(inner, error)
                raise

    def _check_ahead(self) -> None:
        if self._early.full(limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES):
            raise ProtocolError(
                f"the client sent {len(self._early):,} messages of {self._early.nbytes:,} bytes without reading a reply; the limits are "
                f"{limits.BACKLOG_FRAMES:,} messages and {limits.BACKLOG_BYTES:,} bytes"
            )

    def gone(self) -> bool:
        """True if the connection broke more than the lease ago. The clock starts when this end finds out."""
        left = self.lease_seconds_left()
        return left is not None and left < 0.0

    def _note_break(self, broken: Connection, error: TransportError) -> None:
        """Begin the lease, if `broken` is the present connection and has not begun it before."""
        with self._lock:
            if self._inner is not broken or self._missed is broken:
                return
            self._missed, self._missed_at = broken, time.monotonic()
        if not self._expired:
            _log.info("a client's connection broke; its session waits", seconds=self._seconds, reason=str(error))

    def lease_seconds_left(self) -> float | None:
        """Return the seconds until the lease of a disconnected client ends; None while the client is connected. Thread-safe."""
        with self._lock:
            return self._missed_at + self._seconds - time.monotonic() if self._missed is self._inner else None

    def call_when_changed(self, changed: Callable[[], None]) -> None:
        """As `ExecutorChannel.call_when_changed`."""
        self._changed = changed

    def on_goodbye(self) -> None:
        """As `ExecutorChannel.on_goodbye`. A session that waits for the client to reconnect continues with the received frames."""
        self._client_left = True
        self._changed()

    @property
    def away_until(self) -> float | None:
        """As `ExecutorChannel.away_until`."""
        if self._missed is not self._inner or self._client_left or self._expired or self._closed:
            return None
        until = self._missed_at + self._seconds
        return until if time.monotonic() < until else None

    @property
    def is_full(self) -> bool:
        """As `ExecutorChannel.is_full`."""
        return self.away_until is not None and self._outbox.nbytes > self._window

    def decided(self) -> bytes | None:
        """As `ExecutorChannel.decided`."""
        return self._past.note if self._past is not None else None

    def _restore(self, broken: Connection, error: TransportError) -> None:
        self._copy_borrowed()  # the wait may be long, and ops overwrite borrowed memory
        self._read_goodbye()
        self._note_break(broken, error)
        with self._lock:
            if self._inner is not broken:
                return
            until = self._missed_at + self._seconds
        if self._client_left:
            with self._keeping:
                self._outbox.acknowledge(self._outbox.sent)
        elif self._expired:
            raise error
        elif time.monotonic() < until:
            raise NotReconnected("the client is not connected")
        else:
            self._closed = f"the client did not come back within {self._seconds:g} s: {error}"
            raise TransportError(self._closed)

    def _raise_disconnected(self, error: TimeoutError) -> None:
        if isinstance(error, NotReconnected):
            raise error

    def _read_goodbye(self) -> None:
        """Handle a `Goodbye` that arrived before the connection broke."""
        with contextlib.suppress(TransportError, ProtocolError):
            self.read_ahead(limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES)
        if any(is_of_kind(frame.head, Goodbye) for frame in self.queued()):
            self.on_goodbye()

    def resume(self, inner: Connection, taken: int, resumed: Callable[[], None] = lambda: None) -> None:
        """Continue over another connection; the client has received `taken` frames. `resumed` is called when the session goes on.

        Raises:
            ProtocolError: the client cannot have received that many.
            TransportError: the connection broke at once, or the session has ended meanwhile.
        """

        def greet(mine: int) -> None:
            if self._closed:  # before `inner` was the connection that `close` closes
                raise TransportError(self._closed)
            send_message(inner, Resumed(mine, instance()))

        try:
            self._adopt(inner, taken, greet)
            self._usage.count("sessions_resumed")
            resumed()
        except TransportError:
            inner.close()
            raise
        finally:
            self._changed()  # the former connection, for which a session may wait, is closed

    def expire(self) -> None:
        """As `ReliableConnection.expire`; a session that waits for its client ends."""
        super().expire()
        self._changed()

    def close(self) -> None:
        """As `ReliableConnection.close`."""
        super().close()
        if self._journal is not None:
            self._journal.end()
        if self._past is not None:
            self._past.close()
        self._changed()


class Leases:
    """Sessions to which their clients may reconnect, by name."""

    def __init__(self, config: RecoveryConfig, usage: UsageMetrics, disk: DiskQuota) -> None:
        self._config = config
        self._usage = usage
        self._disk = disk
        self._leased: dict[str, LeasedConnection] = {}
        self._lock = threading.Lock()
        self._swept = time.monotonic()  # the process that started this one has done it

    @property
    def seconds(self) -> float:
        """Seconds for which a session waits for its client; 0.0: it ends with its connection."""
        return self._config.lease_seconds

    @property
    def patience(self) -> float:
        """Seconds for which peers may wait for this executor, including a restart."""
        return self.seconds + (STARTING_SECONDS if self.recoverable else 0.0) if self.seconds else 0.0

    @property
    def recoverable(self) -> bool:
        """True if sessions can be recovered after the process has died."""
        return self._config.journals is not None

    def journaled(self) -> tuple[int, int]:
        """Number of the sessions that have a journal, and the bytes of all of these."""
        with self._lock:
            leased = list(self._leased.values())
        sizes = [size for one in leased if (size := one.journal_bytes()) is not None]
        return len(sizes), sum(sizes)

    def next_lease_end(self) -> float | None:
        """Return the seconds until the next lease of a disconnected client ends; None if all clients are connected."""
        with self._lock:
            leased = list(self._leased.values())
        return min((left for one in leased if (left := one.lease_seconds_left()) is not None), default=None)

    def lease(self, owner: SessionIdentity, connection: Connection) -> LeasedConnection:
        """Register a lease, so that the client may reconnect; returns the session's channel."""
        journal = None
        path = journal_path(self._config.journals, owner.session) if self._config.journals is not None else None
        if path is not None:
            self._sweep(path.parent)
            try:
                journal = Journal.begin(path, owner, self._config.journal_limit, self._disk)
                journal.contents = BlobFiles(contents_folder(path))
            except OSError as error:
                _log.warning("a session will not outlive its executor: no journal", error=str(error))
        leased = LeasedConnection(
            connection, self.seconds, self._usage, owner.secret, journal, self._config.snapshot_seconds
        )
        with self._lock:
            self._leased[owner.session] = leased
        return leased

    def _sweep(self, journals: Path) -> None:
        """Now and then, remove what clients that never came back have left."""
        with self._lock:
            due = time.monotonic() - self._swept > SWEEP_SECONDS
            self._swept = time.monotonic() if due else self._swept
        if due:
            remove_stale(journals)

    def recover(
        self, connection: Connection, asked: Resume, assign: Callable[[Badge], str] = lambda _: ""
    ) -> tuple[SessionIdentity, LeasedConnection, int] | None:
        """Recover a session from the journal of an executor that died; returns the number of frames that it had received, too.

        None if there is no journal, or the secret is wrong. `assign` assigns the executor to the tenant and returns why recovery is
        not allowed now, or ""; the journal is kept in that case.

        Raises:
            SessionLost: the journal cannot be read.
            OSError: the same.
            QuotaExceeded: it may not go on now.
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
        return past.owner, leased, past.taken

    def _continue(self, connection: Connection, path: Path, past: JournalReader, taken: int) -> LeasedConnection:
        """A connection that continues the session of a journal; the client has received `taken` of its replies."""
        # from here on no other process uses it
        journal = Journal(path, past.owner, self._config.journal_limit, self._disk)
        journal.contents = BlobFiles(contents_folder(path))
        try:
            if past.tried >= TRIES:
                journal.end()
                raise CrashLoop(
                    f"executors died {past.tried + 1} times while they did the same, the log of the server says how"
                )
            if not past.is_at(path):
                journal.end()  # which made it anew
                raise SessionLost("the session has ended meanwhile")
            journal.truncate(past.end)
            connection.limits = Limits()
            journal.try_again()
            leased = LeasedConnection(
                connection, self.seconds, self._usage, past.owner.secret, journal, self._config.snapshot_seconds
            )
            leased.repeat(past, taken)
        except BaseException:
            journal.leave()
            raise
        return leased

    def end(self, session: str) -> None:
        """A session has ended; its connection is closed."""
        with self._lock:
            leased = self._leased.pop(session, None)
        if leased is not None:
            leased.close()

    def serve(self, connection: Connection, asked: Resume, resumed: Callable[[], None] = lambda: None) -> bool:
        """Resume a session over `connection`. A wrong secret is answered like an unknown session.

        `resumed` is called when the session goes on. Return True if the session has the connection from now on.
        """
        with self._lock:
            leased = self._leased.get(asked.session)
        expected = leased.secret if leased is not None else secrets.token_urlsafe(32)
        if not hmac.compare_digest(expected, asked.secret) or leased is None:
            _log.warning("a client came back to a session that is not there", session=asked.session)
            refuse(connection, "there is no such session (any more)")
            return False
        connection.limits = Limits()
        try:
            leased.resume(connection, asked.received, resumed)
        except ProtocolError as error:
            _log.warning("a client came back that does not follow the protocol", error=str(error))
            refuse(connection, str(error))
        except TransportError as error:
            _log.info("a client that came back was gone again", session=asked.session, error=str(error))
        else:
            return True
        return False

    def knows(self, session: str, secret: str) -> bool:
        """Check that `secret` is that of a session that is here."""
        with self._lock:
            leased = self._leased.get(session)
        expected = leased.secret if leased is not None else secrets.token_urlsafe(32)
        return hmac.compare_digest(expected, secret) and leased is not None

    def expire(self) -> None:
        """End all leases: no client may reconnect any more."""
        with self._lock:
            leased = list(self._leased.values())
        for connection in leased:
            connection.expire()
