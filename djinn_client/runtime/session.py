"""The client's end of a session with one executor: submissions out, replies in, and uploads beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from djinn_client.interception.runtime_interface import (
    CacheMemory,
    Publication,
    SavedWeights,
    Submission,
)
from djinn_client.runtime.client_session import ClientSession
from djinn_client.runtime.connecting.client_channel import ClientChannel
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_client.runtime.observing import Observers
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.receiving.read_progress import follow_reads
from djinn_client.runtime.receiving.replies import Replies
from djinn_client.runtime.receiving.reply_reader import ReplyReader
from djinn_client.runtime.sending.compressing import UploadCompressor
from djinn_client.runtime.sending.submissions import Submissions
from djinn_client.runtime.sending.uploads import Uploader
from djinn_client.runtime.stats import Stats
from djinn_core.errors import ProtocolError, WeightsUnavailable
from djinn_core.ir.stored_tensor import StoredTensor, UnfinishedOpening, WeightListing
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.system.printable import is_text
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import pack_handles, unpack_handles
from djinn_core.wire.cache_messages import CacheAction, CacheReply, CacheRequest
from djinn_core.wire.messages import StatsReply, StatsRequest
from djinn_core.wire.tensors import dtype_from_name
from djinn_core.wire.weight_messages import (
    OpenWeights,
    OpenWeightsReply,
    PublishedReply,
    PublishedRequest,
    ReadProgressReply,
    ReadProgressRequest,
    RemoveWeights,
    RemoveWeightsReply,
    SaveWeights,
    SaveWeightsReply,
)

if TYPE_CHECKING:
    from djinn_core.ir.profile import WorkloadProfile

OPENING_PATIENCE: Final = 0.5  # seconds for which the executor may keep a reply about an address that it still opens


class Session:
    """Implements `ClientSession` and `ReadingSession` with one executor.

    Sending is serialised by the recorder's lock; whichever thread waits for a reply reads the connection.
    """

    takes_pieces = None
    topology = None
    membership = None
    successor: ClientSession | None = None  # the pool of which its executor is now one

    def __init__(
        self,
        channel: ClientChannel,
        planner: Planner,
        stats: Stats,
        server: str,
        observers: Observers,
        *,
        caches_weights: bool = False,
        compressions: Sequence[str] = (),
        weight_sources: Sequence[str] = (),
        called: str = "",
        reader: ReplyReader | None = None,
    ) -> None:
        """`caches_weights`, `compressions`, `weight_sources`: as in `Attached`. `server`, `called`: as in `ExecutorLink`.

        `reader`: reads its replies, where failures are shared with other sessions.
        """
        self.link = ExecutorLink(channel, stats, server, called)
        self.replies = replies = Replies(self.link, reader or ReplyReader(Failures(), 0), stats, observers)
        # As the functions of `Runtime` that are called so.
        self.wait, self.defer, self.discard = replies.wait, replies.defer, replies.discard
        self.mark_unobserved, self.has_come = replies.mark_unobserved, replies.has_come
        self.uploads = Uploader(
            self.link, self.replies, stats, observers, caches_weights, UploadCompressor(compressions)
        )
        self.submissions = Submissions(self.link, self.replies, planner, stats, observers)
        self._observers = observers
        channel.call_when_resumed(lambda seconds: observers.tell("reconnected", server=server, duration=seconds))
        self.unread = 0
        self._weight_sources = frozenset(weight_sources)

    @property
    def server(self) -> str:
        """As `ClientSession.server`."""
        return self.link.server

    @property
    def lost(self) -> str:
        """As `ClientSession.lost`."""
        return self.link.lost

    def home(self, storage: int) -> int | None:  # noqa: ARG002 - there is one
        """As `ClientSession.home`."""
        return 0

    # --- out ---------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> int:
        """As `Runtime.submit`. The caller holds the recorders' lock.

        Raises:
            SessionLost: the executor is gone.
        """
        if self.unread:
            follow_reads((self,), self._observers)
        return self.submissions.submit(submission)

    def upload(self, handle: int, source: torch.Tensor, device: int = 0) -> None:  # noqa: ARG002 - there is one
        """As `Runtime.upload`.

        Raises:
            SessionLost: the executor is gone.
        """
        with interrupt_mask:
            self.uploads.upload(handle, source)

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `Runtime.expect_uploads`."""
        if tensors:
            self._observers.tell("uploading", bytes=sum(t.nbytes for t in tensors))
        with interrupt_mask:
            self.uploads.expect(tensors)

    def read_weights(self, handle: int, stored: StoredTensor, device: int = 0) -> None:  # noqa: ARG002 - there is one
        """As `Runtime.read_weights`.

        Raises:
            SessionLost: the executor is gone.
        """
        with interrupt_mask:
            self.uploads.read(handle, stored)
        self.unread += stored.nbytes if self._observers.wants("reading") else 0

    def left_to_read(self, patience: float) -> int:
        """As `ReadingSession.left_to_read`.

        Raises:
            SessionLost: the executor is gone.
        """
        return self.replies.ask(ReadProgressRequest(patience), ReadProgressReply).left

    # --- in ----------------------------------------------------------------------------------------------------

    @property
    def round_trip_seconds(self) -> float | None:
        """As `Runtime.round_trip_seconds`."""
        return self.replies.round_trip_seconds

    def interrupted(self) -> None:
        """As `Runtime.interrupted`."""
        self.replies.cancellation.interrupted()

    # --- the session itself ------------------------------------------------------------------------------------

    def figures(self, *, reset_peak: bool = False, device: int = 0) -> dict[str, int]:  # noqa: ARG002 - there is one
        """As `Runtime.figures`.

        The executor starts to count the peak again where `reset_peak` says so.

        Raises:
            SessionLost: the executor is gone.
        """
        return dict(self.replies.ask(StatsRequest(reset_peak), StatsReply).values)

    def open_weights(self, address: str, device: int = 0) -> WeightListing | UnfinishedOpening:  # noqa: ARG002 - there is one
        """As `Runtime.open_weights`.

        Raises:
            WeightsUnavailable: there are none, or the server may not or cannot read them.
            SessionLost: the executor is gone.
        """
        scheme = address.partition(":")[0]
        if scheme not in self._weight_sources:
            known = ", ".join(f"{name}:" for name in sorted(self._weight_sources)) or "nothing"
            raise WeightsUnavailable(f"{self.link.called} reads no weights from {address!r}: it reads {known}")
        if len(address) > limits.STORED_ADDRESS:
            raise WeightsUnavailable(f"an address has at most {limits.STORED_ADDRESS} characters, not {len(address):,}")
        if not is_text(address):
            raise WeightsUnavailable(f"an address is text that can be sent, which {address!r} is not")
        reply = self.replies.ask(OpenWeights(address, OPENING_PATIENCE), OpenWeightsReply)
        if reply.unfinished:
            self._observers.tell("downloading", address=address, done=reply.done, expected=reply.expected)
            return UnfinishedOpening(reply.done, reply.expected)
        if reply.refused:
            raise WeightsUnavailable(f"{self.link.called}: {reply.refused}")
        there = reply.address or address
        found = WeightListing({}, dict(reply.metadata))
        for one in reply.tensors:
            try:
                dtype = dtype_from_name(one.dtype)
            except ProtocolError:  # a quantized format, or a dtype of a later PyTorch
                found.unreadable[one.name] = one.dtype
            else:
                found.tensors[one.name] = StoredTensor(there, reply.version, one.name, dtype, one.shape)
        return found

    def save_weights(
        self,
        address: str,
        names: Sequence[str],
        handles: Sequence[int],
        metadata: Mapping[str, str],
        seconds: float = 0.0,
    ) -> SavedWeights:
        """As `Runtime.save_weights`.

        Raises:
            WeightsUnavailable: the server cannot or may not write there.
            SessionLost: the executor is gone.
        """
        too_long = [name for name in names if len(name) > limits.STORED_NAME]
        if len(names) > limits.STORED_TENSORS or too_long or len(address) > limits.STORED_ADDRESS:
            raise WeightsUnavailable(
                f"a file has at most {limits.STORED_TENSORS:,} tensors, with names of at most {limits.STORED_NAME:,} characters, "
                f"and an address at most {limits.STORED_ADDRESS:,}"
            )
        message = SaveWeights(address, tuple(names), pack_handles(handles), tuple(metadata.items()), seconds)
        reply = self.replies.ask(message, SaveWeightsReply)
        if reply.refused and not reply.poisoned:
            raise WeightsUnavailable(f"{self.link.called}: {reply.refused}")
        return SavedWeights(reply.nbytes, reply.poisoned)

    def remove_weights(self, address: str, device: int = 0) -> None:
        """As `Runtime.remove_weights`.

        Raises:
            WeightsUnavailable: there is no such file, or it may not or cannot be removed.
            SessionLost: the executor is gone.
        """
        del device  # this session has one
        if len(address) > limits.STORED_ADDRESS or not is_text(address):
            raise WeightsUnavailable(f"an address is text of at most {limits.STORED_ADDRESS} characters")
        reply = self.replies.ask(RemoveWeights(address), RemoveWeightsReply)
        if reply.refused:
            raise WeightsUnavailable(f"{self.link.called}: {reply.refused}")

    def published(self, device: int = 0) -> tuple[Publication, ...]:
        """As `Runtime.published`.

        Raises:
            WeightsUnavailable: the server publishes nothing.
            SessionLost: the executor is gone.
        """
        del device  # this session has one
        reply = self.replies.ask(PublishedRequest(), PublishedReply)
        if reply.refused:
            raise WeightsUnavailable(f"{self.link.called}: {reply.refused}")
        return tuple([Publication(one.name, one.nbytes, one.age, one.left) for one in reply.entries])

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheMemory:
        """As `Runtime.caches`.

        Raises:
            SessionLost: the executor is gone.
        """
        return self._ask_caches(CacheRequest(action, pack_handles(handles)))[0]

    def pinned_caches(self) -> list[int]:
        """Values of the KV caches that are pinned on the executor.

        Raises:
            SessionLost: the executor is gone.
        """
        return self._ask_caches(CacheRequest("look"))[1]

    def _ask_caches(self, request: CacheRequest) -> tuple[CacheMemory, list[int]]:
        reply = self.replies.ask(request, CacheReply)
        found = CacheMemory(reply.nbytes, reply.resident, reply.pinned, reply.limited, reply.refused)
        return found, unpack_handles(reply.values)

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """As `ClientSession.last_profile`.

        Found without analysing anything: a program that came before is known, also where it is sent in pieces. Facts in
        matches, such as the number of keys, and value ids are those of the program when it came first.
        """
        return self.submissions.planner.last_profile

    def plan_by(self, planner: Planner) -> None:
        """As `ClientSession.plan_by`: without the plans of the planner before."""
        self.submissions.planner = planner

    def cancel(self, thread: int | None = None) -> None:
        """As `ClientSession.cancel`."""
        self.replies.cancellation.cancel(thread)

    @property
    def changes_files(self) -> bool:
        """As `ClientSession.changes_files`."""
        return self.replies.awaits(SaveWeights, RemoveWeights)

    def close(self, *, finish: bool = False) -> None:
        """As `ClientSession.close`."""
        self.link.close(finish=finish)
