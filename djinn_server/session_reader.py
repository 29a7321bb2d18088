"""Receive the messages of a session. While the session waits for one message, other messages queue in a backlog."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from concurrent.futures import wait

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Frame
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.frames import FrameQueue
from djinn_core.wire.messages import AnyMessage, Goodbye, TemplateReply, decode
from djinn_core.wire.upload_messages import AbortUpload, UploadPart
from djinn_server.malformed import Unreadable, UnreadableTemplate, UnreadableUpload, decode_partially
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running.cancellation import LOOK_SECONDS, CancellationState, ClientLeft, handle_control
from djinn_server.running.run_request import CANCEL, HaltFlag
from djinn_server.usage_metrics import UsageMetrics
from djinn_server.weights.reads import WeightReads
from djinn_server.weights.uploads import UploadAssembly

_log = get_logger("djinn.server")


class SessionReader:
    """Receive the messages of a session. Not thread-safe.

    Attributes:
        backlog: frames that were received and that the session has not handled yet.
    """

    def __init__(
        self, uploads: UploadAssembly, reads: WeightReads, cancellation: CancellationState, usage: UsageMetrics
    ) -> None:
        self.backlog = FrameQueue()
        self._uploads, self._reads = uploads, reads
        self._cancellation, self._usage = cancellation, usage
        self._goodbye_received = False  # True once a `Goodbye` that asks to finish is in the backlog

    def next_frame(self, connection: ExecutorChannel) -> Frame:
        """Return the client's next frame."""
        return self.backlog.popleft() if self.backlog else connection.receive()

    def read_ahead(self, connection: ExecutorChannel) -> None:
        """Read arrived messages during a wait, so that the client can go on sending and a broken connection is noticed.

        Raises:
            ClientLeft: the client sent `Goodbye`.
        """
        # Half of the backlog: a submission in it may have to wait for a later message.
        frames, nbytes = limits.BACKLOG_FRAMES // 2, limits.BACKLOG_BYTES // 2
        with contextlib.suppress(TimeoutError):
            while not self._goodbye_received and not self.backlog.full(frames, nbytes):
                self._next_urgent(connection, 0.0)

    def await_template(self, connection: ExecutorChannel) -> TemplateReply | UnreadableTemplate:
        """Wait for the reply to a `TemplateRequest`."""
        while True:
            message = self._next_urgent(connection)
            if isinstance(message, TemplateReply | UnreadableTemplate):
                return message

    def await_uploads(self, connection: ExecutorChannel) -> None:
        """Wait until all offered uploads and all weight reads are complete."""
        self.await_reads(connection)
        self.await_offered(connection)

    def await_offered(self, connection: ExecutorChannel) -> None:
        """Wait until all offered uploads are complete."""
        while self._uploads.wanted:
            self._next_urgent(connection)

    def await_reads(
        self, connection: ExecutorChannel, handles: Collection[int] | None = None, halt: HaltFlag | None = None
    ) -> None:
        """Wait until the weight reads of `handles` (None: all) are complete, or until `halt` cancels what waits."""
        while not (halt is not None and halt.value & CANCEL) and (reading := self._reads.next_of(handles)) is not None:
            if not wait((reading,), LOOK_SECONDS).done:
                self.read_ahead(connection)

    def _next_urgent(
        self, connection: ExecutorChannel, timeout: float | None = None
    ) -> AnyMessage | UnreadableTemplate | None:
        """Return the next message if it is a template. Take uploads and cancellations, and queue other messages.

        Raises:
            ClientLeft: the client sent `Goodbye`, so that no further message arrives.
        """
        if self._goodbye_received:
            raise ClientLeft
        frame = connection.receive(timeout)
        message = decode_frame(frame)
        if isinstance(message, UnreadableUpload) and not message.offered:
            self.refuse_upload(message)
            return None
        if isinstance(message, UploadPart | AbortUpload | CancelSubmissions):  # queued messages are counted later
            self._usage.message(type(message).__name__, sum(map(len, frame.body)))
        if isinstance(message, UploadPart):
            self.take_upload(message, frame)
            return None
        if isinstance(message, AbortUpload):
            self.take_withdrawal(message)
            return None
        if isinstance(message, CancelSubmissions):
            self._cancellation.stop(message.submissions)
            return None
        if isinstance(message, TemplateReply | UnreadableTemplate):
            return message
        if isinstance(message, Goodbye):
            handle_control(frame.head, self._cancellation, connection)
            if not message.finish:
                raise ClientLeft
            self._goodbye_received = True
        if self.backlog.full(limits.BACKLOG_FRAMES, limits.BACKLOG_BYTES):
            raise ProtocolError(
                f"the client sent {len(self.backlog):,} messages of {self.backlog.nbytes:,} bytes instead of the template or upload "
                f"that the executor waits for; the limits are {limits.BACKLOG_FRAMES:,} messages and {limits.BACKLOG_BYTES:,} bytes"
            )
        self.backlog.append(frame)
        return None

    def take_upload(self, upload: UploadPart, frame: Frame) -> None:
        """Add a part to its upload. If the part is invalid, the value becomes poison."""
        self._usage.check_values()
        try:
            self._uploads.take(upload, frame.body)
        except ProtocolError as error:
            _log.warning("an upload is refused", reason=str(error))
            self._uploads.refuse(upload.handle, str(error))

    def take_withdrawal(self, withdraw: AbortUpload) -> None:
        """Withdraw an upload that the client aborted."""
        self._usage.check_values()
        self._uploads.withdraw(withdraw.handle)

    def refuse_upload(self, message: UnreadableUpload) -> None:
        """Make the value of an unreadable upload poison."""
        _log.warning("a message cannot be read", reason=message.reason)
        self._uploads.refuse(message.handle, message.reason)


def decode_frame(frame: Frame) -> AnyMessage | Unreadable:
    """Decode the message of a frame, or the readable part of a malformed message.

    Raises:
        ProtocolError: the readable part does not suffice to answer the message.
    """
    try:
        return decode(frame.head)
    except ProtocolError as error:
        found = decode_partially(frame.head, str(error))
        if found is None:
            raise
        return found
