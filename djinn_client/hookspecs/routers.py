"""Routers: assign parts of a program to the executors of a session, and know which executor holds a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec
import torch

from djinn_client.sink import DescribedValue, M, Submission, SubmissionReply
from djinn_core.errors import DjinnError, UnsupportedOperation
from djinn_core.hookspecs import hookspec
from djinn_core.ir.program import Program
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.system.interrupts import interrupt_mask
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import DeviceInfo

if TYPE_CHECKING:
    from djinn_core.ir.costs import NetworkTopology
    from djinn_core.ir.graph import Graph
    from djinn_core.ir.profile import WorkloadProfile
    from djinn_core.ir.result import PipelineResult

EMPTY: Final = Program((), (), ())


class PendingReply(ABC):
    """Reply to a submission that requested values. The object keeps the connection alive."""

    @abstractmethod
    def wait(self) -> SubmissionReply:
        """Wait for the requested values: one round trip. The caller does not hold the lock."""

    @abstractmethod
    def is_there(self) -> bool:
        """Return True if `wait` would not block. This reads replies that have arrived, and never blocks."""

    @abstractmethod
    def discard(self) -> None:
        """Discard the reply on arrival, because no thread will wait for it. Finalizers may call this."""

    @abstractmethod
    def abandon(self) -> None:
        """Discard the reply on arrival, because the thread that waited for it was interrupted."""

    @abstractmethod
    def mark_unobserved(self) -> None:
        """Do not report errors of submissions that this thread sent after this one, unless the program uses their results."""


class Executor(Protocol):
    """One executor of a session. The caller of all methods holds the sink's lock."""

    @property
    def device(self) -> DeviceInfo:
        """The executor's device."""

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """Workload profile of the last program that was sent to the executor, or None if none was profiled."""

    def submit(self, submission: Submission) -> PendingReply:
        """Send a submission without waiting for the reply. The caller holds the lock."""

    def upload(self, handle: int, source: torch.Tensor | StoredTensor) -> None:
        """Upload `source` as the value `handle`. A CPU tensor may be changed after the call."""

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """Announce the CPU tensors that will be uploaded next, in order. They do not change before their upload."""

    def ask(self, message: Message, kind: type[M]) -> M:
        """Send `message`, and return the executor's reply, a message of the class `kind`. Takes one round trip."""


E = TypeVar("E", bound=Executor)


class Executors(Generic[E]):
    """Executors of a session by number, from 0. Numbers are never reused, because executors know each other by number.

    Attributes:
        members: all executors that the session ever had, by number.
        present: numbers of the executors that are in the session now, in order.
        current: the executors whose numbers are in `present`, in the same order.
    """

    def __init__(self) -> None:
        self.members: list[E] = []
        self.present: list[int] = []
        self.current: list[E] = []
        self._heirs: dict[int, int] = {}

    def enter(self, executor: E) -> int:
        """Add an executor. Return its number."""
        self.members.append(executor)
        self.current = [*self.current, executor]
        self.present = [*self.present, len(self.members) - 1]
        return self.present[-1]

    @property
    def indexes(self) -> list[int]:
        """Return the executor numbers of the device indexes 1, 2 and so on."""
        return [self.number_at(index) for index in range(1, len(self.members) + 1)]

    def number_at(self, index: int) -> int:
        """Return the number of the executor of a device index from 1 on.

        If that executor has left the session, return the number of the executor that now has its values.
        """
        number = index - 1
        while number in self._heirs:
            number = self._heirs[number]
        return number

    def for_index(self, index: int) -> list[E]:
        """Return the executor of a device index from 1 on, or all current executors for index 0."""
        return [self.members[self.number_at(index)]] if index else self.current

    def leave(self, number: int, heir: int) -> None:
        """Remove the executor `number` from the session. Its device index refers to the executor `heir` from now on."""
        self.present = [member for member in self.present if member != number]
        self.current = [self.members[member] for member in self.present]
        self._heirs[number] = heir


class Part(msgspec.Struct, frozen=True):
    """One executor's part of a submission.

    Attributes:
        executor: number of the executor.
        submission: the ops and requests for this executor.
        brings: values to copy to this executor first: (handle, number of the executor that has the value).
    """

    executor: int
    submission: Submission
    brings: tuple[tuple[int, int], ...] = ()


class JoinedReplies(PendingReply):
    """Joined reply of the executors that run parts of a submission.

    An interrupted wait keeps the parts that have arrived.

    Attributes:
        waiting: requests without a reply, each with its pending reply.
        errors: errors that executors replied with.
    """

    def __init__(self, submission: Submission, parts: Sequence[tuple[Submission, PendingReply]]) -> None:
        """Join the replies to a submission. `parts`: each executor's request and reply."""
        self._requested = submission.fetch, submission.describe
        self._late = submission.later is not None
        self.waiting = list(parts)
        self._tensors: dict[int, torch.Tensor] = {}
        self._described: dict[int, DescribedValue] = {}
        self._seconds = 0.0
        self.errors: list[DjinnError] = []

    def wait(self) -> SubmissionReply:
        """Wait for the requested values: one round trip."""
        with interrupt_mask:
            try:
                while self.waiting:
                    self._collect_reply(*self.waiting[0])
                    del self.waiting[0]
            except BaseException:
                if not self._late:
                    for _, pending in self.waiting[1:]:
                        pending.abandon()
                raise
        if self.errors:
            first_error, *later_errors = self.errors
            for error in later_errors:
                first_error.add_note(f"also: {error}")
            raise first_error
        fetch, describe = self._requested
        return SubmissionReply(
            tuple([self._tensors[value] for value in fetch]),
            tuple([self._described[value] for value in describe]),
            self._seconds,
        )

    def _collect_reply(self, submission: Submission, pending: PendingReply) -> None:
        try:
            reply = pending.wait()
        except DjinnError as error:
            self.errors.append(error)
            self.note_failure(error)
        else:
            self._tensors.update(zip(submission.fetch, reply.tensors, strict=True))
            self._described.update(zip(submission.describe, reply.described, strict=True))
            self._seconds = max(self._seconds, reply.server_seconds)

    def note_failure(self, error: DjinnError) -> None:
        """Record that an executor replied with an error. Subclasses override this. `wait` still awaits the other replies."""

    def is_there(self) -> bool:
        """Return True if `wait` would not block. This reads replies that have arrived, and never blocks."""
        return all(pending.is_there() for _, pending in self.waiting)

    def discard(self) -> None:
        """Discard the replies on arrival, because no thread will wait for them. Finalizers may call this."""
        for _, pending in self.waiting:
            pending.discard()

    def abandon(self) -> None:
        """Discard the replies on arrival, because the thread that waited for them was interrupted."""
        for _, pending in self.waiting:
            pending.abandon()

    def mark_unobserved(self) -> None:
        """Do not report errors of submissions that this thread sent after this one, unless the program uses their results."""
        for _, pending in self.waiting:
            pending.mark_unobserved()


class Router:
    """Choose which executor runs which part of each program.

    Callers hold the sink's lock, except for `home`, `topology`, `last_profile` and `watch`. This class is the router of
    a session with one executor, which runs every program unchanged. A plugin's router decides in `route` which
    executors run a program and in `upload` which executor gets a value. `home` returns the executor of a value. A
    router that sends the parts itself overrides `submit`. Each session uses a shallow copy of the registered router,
    and `begin` sets the session's state.

    Attributes:
        name: unique among routers. The setting `router` names the router of sessions with several executors.
        preference: the router with the greatest preference is the default. If None, only the setting selects it.
        executors: executors of the session, set by `begin`.
    """

    name = ""
    preference: int | None = None

    def begin(self, executors: Executors[Any], existing_values: Iterable[tuple[int, int]] | None = None) -> None:
        """Begin to route programs of a session, which is new or had one executor.

        `existing_values`: the values of the first executor if it was the only executor until now, each as (handle,
        bytes of its storage). None if the session begins.

        Raises:
            DjinnError: the router cannot begin. The session keeps its executors and its router.
        """
        del existing_values
        self.executors = executors

    def join(self, numbers: Sequence[int]) -> None:
        """Use executors that have joined `executors`.

        Raises:
            DjinnError: the executors cannot join. The caller removes them from `executors`.
        """
        raise UnsupportedOperation(
            f"executors cannot join this session, because the router {self.name!r} does not support it. Choose another "
            "router with the setting `router`, or begin a new session with all executors"
        )

    def leave(self, numbers: Sequence[int]) -> None:
        """Remove executors, given by number, from `executors`. Move all their values to the remaining executors first.

        Raises:
            DjinnError: the values cannot be moved; the session keeps its executors.
        """
        raise UnsupportedOperation(
            f"executors cannot leave this session, because the router {self.name!r} does not support it. Choose another "
            "router with the setting `router`, or begin a new session with fewer executors"
        )

    def route(self, submission: Submission) -> Sequence[Part]:
        """Return the parts of a submission, in the order in which they are sent.

        Every value to fetch, describe or free is in the submission of a part whose executor has it.
        """
        return (Part(self.executors.present[0], submission),)

    def submit(self, submission: Submission) -> PendingReply:
        """Send the parts of a submission to their executors."""
        parts = self.route(submission)
        members = self.executors.members
        if len(parts) == 1 and parts[0].submission is submission and not parts[0].brings:
            return members[parts[0].executor].submit(submission)  # type: ignore[no-any-return]
        replies = []
        for part in parts:
            for value, source in part.brings:
                reply = members[source].submit(Submission(EMPTY, fetch=(value,))).wait()
                members[part.executor].upload(value, reply.tensors[0])
            replies.append((part.submission, members[part.executor].submit(part.submission)))
        return JoinedReplies(submission, [(sent, reply) for sent, reply in replies if sent.is_answered])

    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int = 0) -> None:
        """Upload `source` as the value `handle` of the logical device `device`. A CPU tensor may be changed after the call."""
        self.executors.for_index(device)[0].upload(handle, source)

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Announce the CPU tensors that will be uploaded next, in order. They do not change before their upload."""
        self.executors.current[0].expect_uploads(tensors)

    def ask(self, message: Message, kind: type[M], device: int = 0) -> M:
        """Send `message` to the executor of a logical device, and return its reply of the class `kind`: one round trip."""
        return self.executors.for_index(device)[0].ask(message, kind)  # type: ignore[no-any-return]

    def home(self, storage: int) -> int | None:
        """Return the number of the executor that holds a storage, or None if no executor has the storage yet."""
        del storage
        return self.executors.present[0]

    def drop_plans(self) -> None:
        """Drop cached plans, because settings or plugins that affect plans have changed."""

    def plan(self, graph: Graph) -> PipelineResult | None:
        """Return the plan that a program would get now, or None if the program would be planned for one device."""
        del graph
        return None

    def topology(self) -> NetworkTopology | None:
        """Return the current devices of the executors and links between them, or None if the router does not know them."""
        return None

    def last_profile(self) -> WorkloadProfile | None:
        """Return the workload profile of the last sent program, or None if none was profiled."""
        return self.executors.current[0].last_profile  # type: ignore[no-any-return]

    def watch(self) -> None:
        """Begin to watch executors that an engine started, because the engine may reclaim their machines."""

    def close(self) -> None:
        """Stop background work, because the session ends."""


@hookspec
def djinn_register_routers(settings: Any) -> Iterable[Router]:
    """Return the routers that this plugin offers.

    Called once in the client process, when a session with several executors or with an engine's executor begins, or
    when executors join. The setting `router` names a router. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
