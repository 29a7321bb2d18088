"""Failover of a session to a standby server: replay of logged frames, with periodic snapshots.

A session is a deterministic state machine: the frames that were sent determine its state. The client logs these frames. If
the server no longer answers, the client replays the frames on a standby server, compares the repeated replies with the
earlier replies, and drops them. The executor periodically sends a snapshot of the session, which replaces the log. The
setting `standby` names the standby servers, which need a device of the same kind.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from djinn.hooks import ChannelContext, ClientChannel, StandbyServer, WrappedChannel
from djinn_core.errors import DjinnError, TransportError
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.logs import get_logger
from djinn_core.protocol.delivery.reliable_connection import ReconnectingConnection
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.messages import Attached, ProtocolClose, Submit, decode, encode, is_of_kind
from djinn_core.wire.peer_messages import AwaitTransfer, TransferHeader
from djinn_core.wire.state_messages import StateRequest
from djinn_standby.failover_log import FailoverLog, SnapshotReceiver

_TURN_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 1.0  # seconds of waiting between checks for an interrupt
_log = get_logger("djinn.session")


class StandbyConnection(ReconnectingConnection, WrappedChannel):
    """Channel of a session that continues on another server if its server is lost.

    `send` may be called from several threads, `receive` from one thread at a time.

    Attributes:
        logged: True, because this channel logs sent frames (`ClientChannel.logged`).
        successor: the executor that continued the session last, or None.
        server: name of the present server.
    """

    logged: bool = True
    successor: Attached | None = None

    def __init__(self, inner: ClientChannel, context: ChannelContext) -> None:
        """Wrap a channel, and log all frames that it sends.

        Raises:
            OSError: the log cannot be written.
        """
        self.server = context.server
        self._first_executor = context.attached
        super().__init__(inner)
        self._standby_servers = list(context.standby)
        self._failover_log = FailoverLog(context.log_bytes)
        self._early_frames: deque[Frame] = deque()
        self._pending_transfers = (
            0  # transfers that were sent to the executor and for which it was not told to wait yet
        )
        # A thread that needs both locks takes them in this order.
        self._send_lock = threading.RLock()  # guards logging, sending, and the change of the server
        self._read_lock = threading.RLock()  # guards receiving
        self._closed = ""
        self._expired = False

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Log and send a frame, as `Connection.send`.

        Raises:
            TransportError: no server can continue the session.
        """
        with self._send_lock:
            if self._closed:
                raise TransportError(self._closed)
            self._pending_transfers += is_of_kind(frame.head, TransferHeader) - is_of_kind(frame.head, AwaitTransfer)
            no_pending_transfers = is_of_kind(frame.head, Submit) and not self._pending_transfers
            if no_pending_transfers and self._failover_log.is_due() and not self._expired:
                self._failover_log.compact(self._request_snapshot)
            stops = is_of_kind(frame.head, CancelSubmissions)
            if not stops and not self._expired:
                self._failover_log.record_sent(frame)
            try:
                self._inner.send(frame)
            except TransportError as error:
                self._take_over(self._inner, error)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Frame:
        """Receive a frame, as `Connection.receive`.

        Raises:
            TimeoutError: no frame arrived in time.
            ProtocolError: the other end does not follow the protocol.
            TransportError: no server can continue the session.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            inner = self._inner
            seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                with self._read_lock:
                    if self._early_frames:
                        return self._early_frames.popleft()
                    if self._closed:
                        raise TransportError(self._closed)
                    if inner is not self._inner:
                        continue
                    frame = self._receive_one(inner, seconds_left)
            except TransportError as error:
                if self._closed:
                    raise
                with self._send_lock:
                    self._take_over(inner, error)
                continue
            if frame is not None:
                return frame

    def _receive_one(self, inner: Connection, timeout: float | None) -> Frame | None:
        """Return the next frame, or None if it is a part of a snapshot.

        Raises:
            TransportError: this server cannot continue the session. Another server may continue it.
        """
        frame = inner.receive(timeout)
        if is_of_kind(frame.head, ProtocolClose):
            message = decode(frame.head)
            if isinstance(message, ProtocolClose) and message.stopped and not self._expired:
                raise TransportError(f"{self.server} ended the session: {message.reason}")
            self._failover_log.obstacle = "the server ended the session"
            return frame
        return frame if self._failover_log.record_received(frame) else None

    # --- a new beginning of what is written -------------------------------------------------------------------

    def _request_snapshot(self, snapshot: SnapshotReceiver, limit: int) -> None:
        """Request a snapshot of at most `limit` bytes. Wait until `snapshot` has received it, or it cannot arrive."""
        inner = self._inner
        try:
            inner.send(Frame(encode(StateRequest(limit))))
            self._await_snapshot(inner, snapshot)
        except TransportError as error:
            _log.debug("the session's snapshot did not arrive", reason=str(error))  # the next send reports the error
        finally:
            with self._read_lock:
                snapshot.drop()

    def _await_snapshot(self, inner: Connection, snapshot: SnapshotReceiver) -> None:
        while not snapshot.is_complete and not snapshot.is_interrupted and inner is self._inner:
            if not self._read_lock.acquire(timeout=_TURN_SECONDS):
                continue  # the reading thread receives it
            try:
                frame = self._receive_one(inner, _TURN_SECONDS)
                if frame is not None:
                    self._early_frames.append(frame)
            except TimeoutError:
                continue
            finally:
                self._read_lock.release()

    # --- from one server to the next --------------------------------------------------------------------------

    def _take_over(self, broken: Connection, error: TransportError) -> None:
        """Continue on a standby server, and return when it has the session. The caller holds `_send_lock`.

        Raises:
            TransportError: no server can take over.
        """
        if self._inner is not broken:
            return
        if self._expired or self._closed:
            raise error
        if self._read_lock.acquire(blocking=False):
            try:
                self._read_last_frames(broken)
            finally:
                self._read_lock.release()
        broken.close()  # wakes the reading thread
        with self._read_lock:
            reason = self._takeover_obstacle()
            if reason:
                self._end(f"{error}; {reason}")
            _log.warning(
                "a server is lost, moving the session to a standby server", server=self.server, reason=str(error)
            )
            self._move_to_standby(error)

    def _read_last_frames(self, broken: Connection) -> None:
        """Read the frames that arrived before the connection broke. They may contain the reason."""
        try:
            while True:
                frame = self._receive_one(broken, 0.0)
                if frame is not None:
                    self._early_frames.append(frame)
        except (TransportError, TimeoutError) as end:
            _log.debug("read the last frames of a broken connection", reason=str(end))

    def _takeover_obstacle(self) -> str:
        """Return why no standby server can continue the session, or an empty string if one can."""
        if self._inner.crashes_executors:
            return "a standby server would lose the session for the same reason"
        if self._failover_log.sent is None or self._failover_log.obstacle:
            return f"no standby server can continue the session: {self._failover_log.obstacle}"
        return ""

    def _move_to_standby(self, error: TransportError) -> None:
        errors: list[str] = []
        start = time.monotonic()
        for candidate in list(self._standby_servers):
            try:
                inner, attached = candidate.open()
            except DjinnError as reason:
                errors.append(f"{candidate.name}: {reason}")
                continue
            try:
                self._check_compatible(attached)
                self._replay(inner)
            except TransportError as reason:
                inner.close()
                if self._closed:
                    raise
                errors.append(f"{candidate.name}: {reason}")
            except BaseException:
                inner.close()
                raise
            else:
                seconds = round(time.monotonic() - start, 3)
                _log.warning("a standby server continues the session", server=candidate.name, seconds=seconds)
                self._adopt(inner, attached, candidate)
                return
        self._end(f"{error}; no standby server can continue the session: {'; '.join(errors)}")

    def _check_compatible(self, attached: Attached) -> None:
        """Check that an executor of a standby server can replay the session of the first executor (`_incompatibility`).

        Raises:
            TransportError: it cannot.
        """
        if reason := _incompatibility(self._first_executor, attached):
            raise TransportError(reason)

    def _adopt(self, inner: ClientChannel, attached: Attached, server: StandbyServer) -> None:
        self._failover_log.drop_snapshot()
        self._follow(inner)
        self.successor, self.server = attached, server.name
        self._standby_servers.remove(server)
        self._standby_servers.append(server)

    def _replay(self, inner: Connection) -> None:
        """Replay the logged frames. Receive the replies again, compare their checksums with the earlier replies, and drop them.

        Raises:
            TransportError: the connection broke, or a reply differs. A different reply ends the session.
        """
        position = 0
        for replies, frame in self._failover_log.frames():
            position = self._await_replies(inner, position, replies)
            inner.send(frame)
        self._await_replies(inner, position, len(self._failover_log.replies))

    def _await_replies(self, inner: Connection, position: int, target: int) -> int:
        while position < target:
            try:
                frame = inner.receive(_PATIENCE_SECONDS)
            except TimeoutError:
                continue
            if is_of_kind(frame.head, ProtocolClose):
                raise TransportError(str(getattr(decode(frame.head), "reason", "")))
            if not self._failover_log.replies.agrees(position, frame):
                self._end("the standby server and the lost server computed different results")
            position += 1
        return position

    def _end(self, reason: str) -> None:
        self._closed = reason
        raise TransportError(reason)

    @property
    def reconnection(self) -> None:
        """Return None, because the reconnection to one server does not apply to the next server."""
        return

    def call_when_resumed(self, callback: Callable[[float], None]) -> None:
        """Do nothing, because a resumed connection to one server changes nothing for the session."""

    def expire(self) -> None:
        """Forbid reconnection, as `ClientChannel.expire` does. No standby server continues the session."""
        self._expired = True
        self._inner.expire()

    def close(self) -> None:
        """Close the connection, as `Connection.close`."""
        self._expired = True
        self._closed = self._closed or "the connection was closed"
        self._inner.close()
        self._failover_log.close()


def _incompatibility(first: Attached, second: Attached) -> str:
    """Return why the executor `second` cannot replay a session of the executor `first`, or an empty string if it can."""
    if first.device.kind != second.device.kind:
        return f"the standby server has the device {second.device.kind} in place of {first.device.kind}"
    if first.torch.partition("+")[0] != second.torch.partition("+")[0]:
        return f"the standby server runs torch {second.torch} in place of {first.torch}"
    if not set(first.compressions) <= set(second.compressions):
        return f"the standby server cannot decompress {', '.join(set(first.compressions) - set(second.compressions))}, which uploads may use"
    return ""


def with_standby(channel: ClientChannel, context: ChannelContext) -> ClientChannel:
    """Wrap a session's channel for failover to standby servers.

    If no log file can be written, log this and return the channel unchanged.
    """
    try:
        return StandbyConnection(channel, context)
    except OSError as error:
        _log.warning(
            "no standby server can continue this session, because its log cannot be written", reason=str(error)
        )
        return channel
