"""The client's end of one executor: sends submissions and uploads, and receives replies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from djinn_client.hookspecs.routers import PendingReply
from djinn_client.interception.deadlines import wait_deadline
from djinn_client.runtime.connecting.open import OpenSession
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.receiving.replies import Replies
from djinn_client.runtime.receiving.reply_reader import ReplyReader
from djinn_client.runtime.sending.submissions import Submissions
from djinn_client.runtime.sending.uploads import UploadCompressor, Uploader
from djinn_client.runtime.stats import Stats
from djinn_client.sink import M, Submission, SubmissionReply
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import DeviceInfo
from djinn_core.wire.weight_messages import ReadProgressReply, ReadProgressRequest

if TYPE_CHECKING:
    from djinn_core.ir.profile import WorkloadProfile

# Seconds for which executors, one after the other, may delay replies about weights that they are still reading.
READING_PATIENCE: Final = 0.25
SHOWN_BYTES: Final = 64 << 20  # minimum bytes of stored values for which observers receive the progress


class ExecutorReply(PendingReply):
    """An executor's reply to one submission, identified by its number."""

    __slots__ = ("number", "replies")

    def __init__(self, replies: Replies, number: int) -> None:
        self.replies = replies
        self.number = number

    def wait(self) -> SubmissionReply:
        """Wait for the requested values: one round trip."""
        return self.replies.wait(self.number)

    def is_there(self) -> bool:
        """Return True if `wait` would not block."""
        return self.replies.has_arrived(self.number)

    def discard(self) -> None:
        """Discard the reply on arrival, as `PendingReply.discard`."""
        self.replies.discard(self.number)

    def abandon(self) -> None:
        """Discard the reply on arrival, as `PendingReply.abandon`."""
        self.replies.abandon(self.number)

    def mark_unobserved(self) -> None:
        """Do not report errors of submissions that this thread sent after this one, unless the program uses their results."""
        self.replies.mark_unobserved(self.number)


class ExecutorClient:
    """The client of one executor: it sends programs and tensors, and reads replies.

    The sink's lock serialises sending. The thread that waits for a reply reads the connection.

    Attributes:
        opened: the open session with the executor.
        link: sends frames until the session is lost.
        replies: reads replies.
        uploads: sends tensors.
        submissions: sends programs.
        unread: size in bytes of each stored value that no submission has used yet, by handle. Empty unless an observer
            requests the event `reading`.
    """

    def __init__(
        self, opened: OpenSession, planner: Planner, stats: Stats, observers: Observers, failures: Failures, number: int
    ) -> None:
        """Create a client for the open session `opened`. `failures` and `number` are as in `ReplyReader`."""
        self.opened = opened
        attached, channel, server = opened.attached, opened.connection, opened.url
        self.link = ExecutorLink(channel, stats, server, opened.server)
        self.replies = Replies(self.link, ReplyReader(failures, number), stats)
        self.set_number(number)
        self.uploads = Uploader(
            self.link, self.replies, stats, observers, attached.caches_weights, UploadCompressor(opened.compressions)
        )
        self.submissions = Submissions(self.link, self.replies, planner, stats, observers)
        self._observers = observers
        channel.call_when_resumed(lambda seconds: observers.emit("reconnected", server=server, duration=seconds))
        self.unread: dict[int, int] = {}

    def set_number(self, number: int) -> None:
        """Set the executor's number in failures, as in `ReplyReader`."""
        failures = self.replies.reader.failures
        self.replies.reader = ReplyReader(failures, number)
        if number:
            failures.register_reader(number, self.replies.receive_until)

    @property
    def device(self) -> DeviceInfo:
        """Return the executor's device."""
        return self.opened.attached.device

    @property
    def server(self) -> str:
        """Address of the reached executor."""
        return self.link.server

    def submit(self, submission: Submission) -> ExecutorReply:
        """Send a submission without waiting for the reply.

        Raises:
            SessionLost: the executor is gone.
        """
        if self.unread:
            follow_reads((self,), self._observers, submission)
        number = self.submissions.submit(submission)
        if submission.later is not None:
            self.replies.deferred.defer(number, submission.later)
        return ExecutorReply(self.replies, number)

    def upload(self, handle: int, source: torch.Tensor | StoredTensor) -> None:
        """Upload `source` as the value `handle`.

        Raises:
            SessionLost: the executor is gone.
        """
        with interrupt_mask:
            if not isinstance(source, StoredTensor):
                self.uploads.upload(handle, source)
                return
            self.uploads.read(handle, source)
        if self._observers.wants("reading"):
            self.unread[handle] = source.nbytes

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """Announce the CPU tensors that will be uploaded next, in order. They do not change before their upload."""
        if tensors:
            self._observers.emit("uploading", bytes=sum(t.nbytes for t in tensors))
        with interrupt_mask:
            self.uploads.expect(tensors)

    def bytes_left_to_read(self, patience: float) -> int:
        """Wait at most `patience` seconds until the executor has read the requested weights. Return the bytes still unread.

        Raises:
            SessionLost: the executor is gone.
        """
        return self.replies.ask(ReadProgressRequest(patience), ReadProgressReply).left

    def ask(self, message: Message, kind: type[M]) -> M:
        """Send `message`, and return the executor's reply, a message of the class `kind`. Takes one round trip.

        Raises:
            SessionLost: the executor is gone.
            DeadlineExceeded: the deadline of this thread has passed.
        """
        reply = self.replies.ask(message, kind, wait_deadline())
        if reason := getattr(reply, "refused", ""):
            return msgspec.structs.replace(reply, refused=f"{self.link.name}: {reason}")
        return reply

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Return the workload profile of the last program that was sent, or None if none was sent.

        A program that ran without a plan is analysed by this call. Value ids and counts, such as the number of attention
        keys, are those of the program's first run.
        """
        return self.submissions.planner.last_profile


def follow_reads(executors: Sequence[ExecutorClient], observers: Observers, submission: Submission) -> None:
    """Emit the event `reading` while executors read the stored values that `submission` uses, until they have read them.

    An interrupt and the thread's deadline also end this. It returns at once if the program does not wait for the
    submission, or if the submission uses less than `SHOWN_BYTES` of stored values.

    Raises:
        SessionLost: an executor is gone.
    """
    handles = {*submission.program.operands, *submission.fetch, *submission.describe}
    reads_left: dict[ExecutorClient, int] = {}
    for executor in executors:
        for handle in submission.free:
            executor.unread.pop(handle, None)
        if nbytes := sum([executor.unread.pop(handle) for handle in handles & executor.unread.keys()]):
            reads_left[executor] = nbytes
    total = sum(reads_left.values())
    if total < SHOWN_BYTES or submission.later is not None or not submission.is_answered:
        return
    until = wait_deadline()
    while reads_left and not interrupt_mask.pending and (until is None or time.monotonic() < until):
        patience = READING_PATIENCE / len(reads_left)
        for executor in list(reads_left):
            with interrupt_mask.uninterruptible:
                reads_left[executor] = executor.bytes_left_to_read(patience) - sum(executor.unread.values())
        reads_left = {executor: nbytes for executor, nbytes in reads_left.items() if nbytes > 0}
        observers.emit("reading", done=max(0, total - sum(reads_left.values())), expected=total)
