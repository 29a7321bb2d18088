"""The client's end of several sessions that work as one: each submission goes to the executors that have a part in it."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs
import torch

from djinn_client.interception.runtime_interface import (
    WHOLE,
    CacheMemory,
    DescribedValue,
    Publication,
    SavedWeights,
    Submission,
    SubmissionReply,
)
from djinn_client.runtime.connecting.open_session import OpenSession
from djinn_client.runtime.planning.planner import Planner
from djinn_client.runtime.pool.executors import PoolExecutors
from djinn_client.runtime.pool.load_balancing import LoadBalancer, ProgramFamily
from djinn_client.runtime.pool.parts import AwaitStep, FreeStep, PooledPlan, RunPart, TransferStep, UploadStep
from djinn_client.runtime.receiving.read_progress import follow_reads
from djinn_client.runtime.sending import submissions
from djinn_client.runtime.session import Session
from djinn_core.errors import DeadlineExceeded, DjinnError, SessionLost, UnsupportedOperation, WeightsUnavailable
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.stored_tensor import StoredTensor, UnfinishedOpening, WeightListing
from djinn_core.system.interrupts import InterruptibleLock, interrupt_mask
from djinn_core.wire.cache_messages import CacheAction

NOTHING = Program((), (), ())
UNREAD: Final = (
    1  # replies that may wait to be read: what executors say of their links counts for the plan of a whole program
)


@attrs.define
class _ExecutorRequest:
    """Requests to one executor beside its parts: values to fetch and to describe, by position, and values to free."""

    fetch: dict[int, int] = attrs.field(factory=dict)
    describe: dict[int, int] = attrs.field(factory=dict)
    free: list[int] = attrs.field(factory=list)
    synchronize: bool = False

    def __bool__(self) -> bool:
        return bool(self.fetch or self.describe or self.free or self.synchronize)

    @property
    def answered(self) -> bool:
        """True if the response contains something that a caller waits for."""
        return bool(self.fetch or self.describe or self.synchronize)

    def submission(self, program: Program) -> Submission:
        return Submission(
            program, tuple(self.free), tuple(self.fetch.values()), tuple(self.describe.values()), self.synchronize
        )


_ExecutorRequests = defaultdict[int, _ExecutorRequest]  # by executor, where there are any


@attrs.frozen
class _ExecutorQuery:
    """Request to one executor, and the positions of its results among those of the submission."""

    executor: int
    number: int
    fetched: tuple[int, ...]
    described: tuple[int, ...]


@attrs.define
class _PendingReply:
    """A submission that a caller waits for; `sent`: by executor the number of its last submission then.

    A caller that was interrupted while it waited for a deferred response may wait again: what has come is kept.
    """

    questions: tuple[_ExecutorQuery, ...]
    sent: tuple[int, ...]
    fetched: int
    described: int
    late: bool = False
    heard: int = 0  # questions that were answered
    tensors: dict[int, torch.Tensor] = attrs.field(factory=dict)
    values: dict[int, DescribedValue] = attrs.field(factory=dict)
    errors: list[DjinnError] = attrs.field(factory=list)
    seconds: float = 0.0
    began: float = 0.0
    took: Callable[[float], None] | None = None  # is told the seconds from `began` until all has come
    alike: ProgramFamily | None = None  # the programs whose turns depend on it
    synchronized: tuple[int, ...] = ()  # by executor the frames after which nothing is under way when all has come

    @property
    def waiting(self) -> tuple[_ExecutorQuery, ...]:
        return self.questions[self.heard :]

    @property
    def next(self) -> _ExecutorQuery | None:
        return self.questions[self.heard] if self.heard < len(self.questions) else None

    def hear(self, question: _ExecutorQuery, answer: SubmissionReply | DjinnError) -> None:
        """The answer to the next question."""
        if isinstance(answer, DjinnError):
            self.errors.append(answer)
        else:
            self.tensors.update(zip(question.fetched, answer.tensors, strict=True))
            self.values.update(zip(question.described, answer.described, strict=True))
            self.seconds = max(self.seconds, answer.server_seconds)
        self.heard += 1

    def answer(self) -> SubmissionReply:
        """Results of the submission, from all executors."""
        if self.errors:
            raise _joined(self.errors)
        tensors = tuple([self.tensors[i] for i in range(self.fetched)])
        return SubmissionReply(tensors, tuple([self.values[i] for i in range(self.described)]), self.seconds)


class PoolSession:
    """Implements `ClientSession` over several executors."""

    successor = None

    def __init__(self, executors: PoolExecutors) -> None:
        self.executors = executors
        self.membership = membership = executors.membership
        self.members = membership.members
        self._planner = planner = executors.planner
        self._locations = executors.locations
        self._routes = executors.routes
        self._uploads = executors.uploads
        self._links = executors.links
        self._peer_reconnection = executors.peer_reconnection
        self._numbers = itertools.count(1)
        self._tables = InterruptibleLock()  # uploads come from any thread, while another one submits
        self._asked: dict[int, _PendingReply] = {}
        self._synchronized: tuple[int, ...] = ()
        self._turns = LoadBalancer(membership)
        planner.act_by(self._carry_out, self._free_copies)

    def plan_by(self, planner: Planner) -> None:
        """As `ClientSession.plan_by`; `planner` says what plans depend on, and does not plan."""
        self._planner.forget_plans(planner)

    def home(self, storage: int) -> int | None:
        """As `ClientSession.home`."""
        return self._locations.homes.get(storage)

    @property
    def server(self) -> str:
        """As `ClientSession.server`."""
        return ", ".join(member.server for member in self.membership.here)

    @property
    def topology(self) -> NetworkTopology:
        """As `ClientSession.topology`."""
        return self._links.topology

    def know_devices(self, devices: Sequence[DeviceCapabilities]) -> None:
        """Plan from now on with what was measured of the devices. The caller holds the recorders' lock."""
        self._links.replace_devices(devices)
        self._planner.know_devices(devices)

    @property
    def last_profile(self) -> WorkloadProfile | None:
        """As `ClientSession.last_profile`."""
        return self._planner.last_profile

    @property
    def lost(self) -> str:
        """As `ClientSession.lost`: it is lost with the first executor."""
        for member in self.membership.here:
            if member.link.lost:
                return member.link.lost
        return ""

    def _check(self) -> None:
        if lost := self.lost:
            raise SessionLost(lost)

    # --- executors -----------------------------------------------------------------------------------------------

    def join(self, opened: Sequence[OpenSession]) -> None:
        """As `PoolExecutors.join`, while no thread uploads."""
        with self._tables:
            self.executors.join(opened)

    def leave(self, numbers: Sequence[int]) -> None:
        """As `PoolExecutors.leave`, while no thread uploads."""
        with self._tables:
            self.executors.leave(numbers)

    # --- out ---------------------------------------------------------------------------------------------------

    def takes_pieces(self, recorded: object) -> bool:
        """As `Runtime.takes_pieces`: where a program runs is decided over all of it, unless it keeps to one executor anyway."""
        return self._planner.affinities.takes_pieces(recorded, self._planner.link_changes)

    def submit(self, submission: Submission) -> int:
        """As `Runtime.submit`. The caller holds the recorders' lock.

        Raises:
            SessionLost: an executor is gone.
        """
        if interrupt_mask.depth:
            return self._submit_masked(submission)
        with interrupt_mask:
            return self._submit_masked(submission)

    def _submit_masked(self, submission: Submission) -> int:
        unread = UNREAD if submission.at == WHOLE else submissions.UNREAD
        for member in self.membership.here:
            member.submissions.make_ready(unread)
        with self._tables:
            prepared = self._prepare(submission) if submission.program.calls else None
            with interrupt_mask.uninterruptible:  # what all of them have to hear is said to all of them
                return self._submit(submission, prepared)

    def _submit(self, submission: Submission, prepared: tuple[ProgramFamily, PooledPlan, Sequence[int]] | None) -> int:
        number, questions, began = next(self._numbers), [], 0.0
        took: Callable[[float], None] | None = None
        alike: ProgramFamily | None = None
        if prepared is not None:
            alike, plan, values = prepared
            if alike.tried is not None and not any(member.replies.pending for member in self.membership.here):
                took = alike.clock()  # otherwise it would wait for what was before
                began = time.perf_counter()
            requests = self._requests(submission, self._account(plan, values))
            if self._planner.derived.values.some:
                written = [values[i] for i in plan.written]
                self._forget_derived(requests, submission.free, submission.program.dead, written)
            questions = self._do(plan, values, submission.program, requests)
            if plan.dead and self._uploads:  # those that nothing has used which runs
                self._uploads.drop([values[i] for i in plan.dead])
        else:
            requests = self._requests(submission, [])
            if self._planner.derived.values.some:
                self._forget_derived(requests, submission.free)
            self._follow_reads()
        for executor in self.membership.present if requests else ():
            request = requests[executor]
            if request.synchronize and self.members[executor].link.sent in self._synchronized[executor : executor + 1]:
                request.synchronize = False  # it has heard nothing since it was asked the last time
            if request:
                told = self._tell(executor, request)
                if request.answered:
                    questions.append(self._question(executor, request, told))
        if submission.fetch or submission.describe or submission.synchronize:
            sent = tuple([member.submissions.last_number for member in self.members])
            lengths = len(submission.fetch), len(submission.describe)
            asked = self._asked[number] = _PendingReply(
                tuple(questions), sent, *lengths, began=began, took=took, alike=alike
            )
            if submission.synchronize:
                asked.synchronized = tuple([member.link.sent for member in self.members])
            self._note(number, questions, alike)
        return number

    def _prepare(self, submission: Submission) -> tuple[ProgramFamily, PooledPlan, Sequence[int]]:
        """The plan of a program, for the executor whose turn it is, and the programs like it; of a piece those like the whole program."""
        planner, program, known = self._planner, submission.program, submission.known
        planner.link_changes = self._links.listen()
        alike, values = planner.find(program)
        affinity = planner.affinities.get(known) if submission.at != WHOLE and known is not None else None
        if affinity is not None:
            asked = bool(submission.fetch or submission.describe or submission.synchronize)
            affinity.goes_on(submission.at + len(program), asked=asked)
            if (prepared := planner.prepare_piece(program, submission.at, affinity, alike, values)) is not None:
                return affinity.family, *prepared
            affinity.reset()
        plan, extended = planner.prepare(program, alike, values, self._turns.next(alike))
        alike.sender = 0  # where it was left in the middle of a program, it is no reason to take turns any more
        alike.ran(plan, extended)
        if submission.at == WHOLE and known is not None:
            planner.ran_whole(known, program, alike, plan)
        return alike, plan, extended

    def _carry_out(self, plan: PooledPlan, program: Program) -> None:
        """Carry out a plan without asking for results."""
        values = tuple(dict.fromkeys(program.operands))
        with interrupt_mask.uninterruptible:
            self._account(plan, values)
            self._do(plan, values, program, defaultdict(_ExecutorRequest))

    def free_on(self, executor: int, values: Sequence[int]) -> None:
        """Free values of one executor that the pool does not know. The caller holds the recorders' lock."""
        with interrupt_mask.uninterruptible:
            self._tell(executor, _ExecutorRequest(free=list(values)))

    def _free_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        """Free copies, as value and executor, that nothing is planned to use any more."""
        with interrupt_mask.uninterruptible:
            for executor in {executor for _, executor in copies}:
                self._tell(executor, _ExecutorRequest(free=[value for value, where in copies if where == executor]))

    def _forget_derived(self, requests: _ExecutorRequests, *touched: Iterable[int]) -> None:
        """Free values derived from weights that were written, or that the program holds no more."""
        derived = self._planner.derived.values
        derived.touched([*itertools.chain(*touched)])
        for executor, freed in self._locations.forget(derived.take_stale()).items():
            requests[executor].free += freed

    def _note(self, number: int, questions: Sequence[_ExecutorQuery], alike: ProgramFamily | None) -> None:
        """Note who was asked: whose turn it is next depends on it."""
        for question in questions:
            self._turns.asked(question.executor, question.number)
        if alike is not None:
            alike.under_way.add(number)

    def _account(self, plan: PooledPlan, values: Sequence[int]) -> list[tuple[int, int]]:
        """Note where things are when the plan has been done; copies that are out of date then, as value and executor."""
        locations = self._locations
        stale = locations.end_copies([values[i] for i in plan.written]) if plan.written else []
        locations.add_all(values, plan.made)
        for i, executor in plan.moved:
            locations.move(values[i], executor)
        for i, executor in plan.dropped:
            locations.drop(values[i], executor)
        for i, executor in plan.copied:
            locations.copy(values[i], (executor,))
        if plan.dead:
            locations.forget([values[i] for i in plan.dead])
        if plan.random is not None:
            self._planner.random = plan.random
        return stale

    def _requests(self, submission: Submission, stale: Sequence[tuple[int, int]]) -> _ExecutorRequests:
        requests: _ExecutorRequests = defaultdict(_ExecutorRequest)
        for executor in self.membership.present if submission.synchronize else ():
            requests[executor].synchronize = True
        for position, value in enumerate(submission.fetch):
            requests[self._home(value)].fetch[position] = value
        for position, value in enumerate(submission.describe):
            requests[self._home(value)].describe[position] = value
        for value, executor in stale:
            requests[executor].free.append(value)
        if submission.free:
            self._uploads.drop(submission.free)
            for executor, freed in self._locations.forget(submission.free).items():
                requests[executor].free += freed
        return requests

    def _home(self, value: int) -> int:
        """The executor that has a value's memory, or is given it by the plan; an upload that no plan gives goes to one now."""
        home = self._planner.home(value)
        if home is None and value in self._uploads:
            self._place(value)
            home = self._planner.home(value)
        return home if home is not None else self.membership.present[0]  # which says that it has no such value

    def _place(self, value: int) -> None:
        executor = self._uploads.roomy(value)
        self._locations.add(value, executor, self._uploads.give(value, executor))
        self._locations.given.add(storage_of(value))

    def _do(
        self, plan: PooledPlan, values: Sequence[int], program: Program, requests: _ExecutorRequests
    ) -> list[_ExecutorQuery]:
        """Have every executor do its parts; what an executor's last part can be asked for is asked there."""
        questions: list[_ExecutorQuery] = []
        begun = self._begin_reads(plan, values) if plan.uploads and self._uploads.reads else ()
        for index, part in enumerate(plan.parts):
            if index in begun:
                continue
            if not isinstance(part, RunPart):
                self._do_between(part, values)
                continue
            self._follow_reads()
            executor = part.executor
            last = plan.last_runs.get(executor) == index
            request = (requests.pop(executor, None) if last else None) or _ExecutorRequest()
            if part.free:
                request.free += [values[i] for i in part.free]
            number = self.members[executor].submissions.run(request.submission(program), part.prepared, values)
            if last and request.answered:
                questions.append(self._question(executor, request, number))
        return questions

    def _begin_reads(self, plan: PooledPlan, values: Sequence[int]) -> set[int]:
        """Have all executors begin to read what a program needs, before any of them computes; the steps that are done so.

        What comes after a step that frees values of the same executor may need the room that it makes.
        """
        begun, freed = set[int](), set[int]()
        for index, part in enumerate(plan.parts):
            if isinstance(part, FreeStep):
                freed.add(part.executor)
            elif (
                isinstance(part, UploadStep)
                and part.executor not in freed
                and values[part.value] in self._uploads.reads
            ):
                self._do_between(part, values)
                begun.add(index)
        return begun

    def _follow_reads(self) -> None:
        members = self.membership.here
        for member in members:
            if member.unread:
                follow_reads(members, self.executors.observers)
                return

    def _do_between(self, part: UploadStep | TransferStep | AwaitStep | FreeStep, values: Sequence[int]) -> None:
        """Carry out a step between the runs of the parts of a program."""
        if isinstance(part, UploadStep):
            self._uploads.give(values[part.value], part.executor)
            self._locations.given.add(storage_of(values[part.value]))
        elif isinstance(part, TransferStep):
            self._routes.ship(part, values[part.value])
        elif isinstance(part, AwaitStep):
            self._routes.expect(part.carry, values[part.carry.value])
        else:
            self._tell(part.executor, _ExecutorRequest(free=[values[i] for i in part.values]))

    def _tell(self, executor: int, request: _ExecutorRequest) -> int:
        return self.members[executor].submissions.run(request.submission(NOTHING))

    @staticmethod
    def _question(executor: int, request: _ExecutorRequest, number: int) -> _ExecutorQuery:
        """Request of a submission to one executor that asks for results."""
        return _ExecutorQuery(executor, number, tuple(request.fetch), tuple(request.describe))

    def upload(self, handle: int, source: torch.Tensor, device: int = 0) -> None:
        """As `Runtime.upload`: it is sent to where it is first used, when that is known, or to the device of its index."""
        self._check()
        if device:
            with interrupt_mask.uninterruptible, self._tables:
                executor = self.membership.number_at(device)
                self.members[executor].upload(handle, source)
                self._locations.add(handle, executor, source.nbytes)
                self._locations.given.add(storage_of(handle))
            return
        copy = source.detach().clone()
        with interrupt_mask.uninterruptible, self._tables:
            self._locations.forget((handle,))  # where it counted as there already, because the pool has just become one
            for waiting in self._uploads.hold(handle, copy):
                self._place(waiting)

    def open_weights(self, address: str, device: int = 0) -> WeightListing | UnfinishedOpening:
        """As `Runtime.open_weights`; all executors of the device must find the same.

        Raises:
            WeightsUnavailable: one of them does not.
        """
        members = self.membership.at(device)
        found: list[tuple[Session, WeightListing]] = []
        for member in members:
            opened = member.open_weights(address)
            if isinstance(opened, UnfinishedOpening):
                return opened
            found.append((member, opened))
        listing = found[0][1]
        for member, other in found[1:]:
            if other.tensors != listing.tensors:
                raise WeightsUnavailable(
                    f"{address!r} is not the same at {member.server} and {found[0][0].server}: a pool reads from one place, "
                    "or from equal copies with equal times"
                )
        return listing

    def save_weights(
        self,
        address: str,
        names: Sequence[str],
        handles: Sequence[int],
        metadata: Mapping[str, str],
        seconds: float = 0.0,
    ) -> SavedWeights:
        """As `Runtime.save_weights`, by the executor that has all of the tensors.

        Raises:
            UnsupportedOperation: none has all of them.
        """
        holders = set(self.membership.present)
        for handle in handles:
            home = self._locations.homes.get(storage_of(handle))
            holders &= (self._locations.copies(handle) or frozenset()) | (frozenset() if home is None else {home})
        if not holders:
            raise UnsupportedOperation(
                f"no executor of the pool has all tensors that are to be saved at {address!r}: "
                "save those of one device at a time, or fetch them and save them here"
            )
        return self.members[min(holders)].save_weights(address, names, handles, metadata, seconds)

    def remove_weights(self, address: str, device: int = 0) -> None:
        """As `Runtime.remove_weights`, at the first executor's server, or that of the one with the index."""
        self.membership.at(device)[0].remove_weights(address)

    def published(self, device: int = 0) -> tuple[Publication, ...]:
        """As `Runtime.published`: the names of the first executor's server, or of the one with the index.

        Raises:
            WeightsUnavailable: it publishes nothing.
        """
        return self.membership.at(device)[0].published()

    def read_weights(self, handle: int, stored: StoredTensor, device: int = 0) -> None:
        """As `Runtime.read_weights`, on the executor that uses it first."""
        self._check()
        with interrupt_mask.uninterruptible, self._tables:
            self._locations.forget((handle,))  # as in `upload`
            if device:
                executor = self.membership.number_at(device)
                self.members[executor].read_weights(handle, stored)
                self._locations.add(handle, executor, stored.nbytes)
                self._locations.given.add(storage_of(handle))
            else:
                self._uploads.hold(handle, stored)

    def expect_uploads(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `Runtime.expect_uploads`. Uploads are copied as they come, so that nothing is gained by knowing of them."""

    # --- in ----------------------------------------------------------------------------------------------------

    def wait(self, number: int) -> SubmissionReply:
        """As `Runtime.wait`.

        Raises:
            RemoteError: a value that it asked for could not be computed, or, where it synchronised, any op failed.
            SessionLost: an executor is gone.
        """
        with interrupt_mask:
            return self._wait(number)

    def _wait(self, number: int) -> SubmissionReply:
        asked = self._asked[number]
        try:
            while (question := asked.next) is not None:
                asked.hear(question, self._answer_to(question))
        except BaseException:
            if not asked.late:
                self._forget(number)
                for question in asked.waiting[1:]:
                    self.members[question.executor].replies.abandon(question.number)
            raise
        self._forget(number)
        if asked.synchronized and not asked.errors:
            self._synchronized = asked.synchronized
        if asked.took is not None and not (asked.late or asked.errors):
            asked.took(time.perf_counter() - asked.began)
        return asked.answer()

    def _answer_to(self, question: _ExecutorQuery) -> SubmissionReply | DjinnError:
        try:
            return self.members[question.executor].wait(question.number)
        except DjinnError as error:
            if isinstance(error, DeadlineExceeded):
                for member in self.membership.here:
                    member.replies.cancellation.stop_waiting()
            return error

    def interrupted(self) -> None:
        """As `Runtime.interrupted`."""
        for member in self.membership.here:
            member.interrupted()

    def cancel(self, thread: int | None = None) -> None:
        """As `ClientSession.cancel`, on all executors."""
        for member in self.membership.here:
            member.cancel(thread)

    def defer(self, number: int, nbytes: int) -> None:
        """As `Runtime.defer`."""
        self._asked[number].late = True
        for question in self._asked[number].questions:
            self.members[question.executor].defer(question.number, nbytes)

    def has_come(self, number: int) -> bool:
        """As `Runtime.has_come`."""
        return all(self.members[q.executor].has_come(q.number) for q in self._asked[number].questions)

    def discard(self, number: int) -> None:
        """As `Runtime.discard`."""
        asked = self._forget(number)
        for question in asked.waiting if asked is not None else ():
            self.members[question.executor].discard(question.number)

    def _forget(self, number: int) -> _PendingReply | None:
        """Forget what was asked: no thread has to wait for it any more."""
        asked = self._asked.pop(number, None)
        if asked is not None and asked.alike is not None:
            asked.alike.under_way.discard(number)
        return asked

    def mark_unobserved(self, number: int) -> None:
        """As `Runtime.mark_unobserved`."""
        asked = self._asked.get(number)
        for member, sent in zip(self.members, asked.sent if asked is not None else (), strict=False):
            member.mark_unobserved(sent)

    @property
    def round_trip_seconds(self) -> float | None:
        """As `Runtime.round_trip_seconds`: that of the farthest executor."""
        known = [s for member in self.membership.here if (s := member.round_trip_seconds) is not None]
        return max(known, default=None)

    # --- life --------------------------------------------------------------------------------------------------

    def figures(self, *, reset_peak: bool = False, device: int = 0) -> Mapping[str, int]:
        """The counts and bytes of an index: of one executor, or the sums of all."""
        total: dict[str, int] = {}
        for member in self.membership.at(device):
            for name, value in member.figures(reset_peak=reset_peak).items():
                total[name] = total.get(name, 0) + value
        return total

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheMemory:
        """As `Runtime.caches`, each executor with the values that it holds."""
        held: dict[int, list[int]] = {} if handles else {number: [] for number in self.membership.present}
        for handle in handles:
            home = self._locations.homes.get(storage_of(handle))
            for number in (self._locations.copies(handle) or frozenset()) | (frozenset() if home is None else {home}):
                held.setdefault(number, []).append(handle)
        found = [self.members[number].caches(action, part) for number, part in sorted(held.items())]
        return CacheMemory(
            sum(one.total for one in found),
            sum(one.resident for one in found),
            sum(one.pinned for one in found),
            all(one.limited for one in found),
            "; ".join(one.refused for one in found if one.refused),
        )

    @property
    def changes_files(self) -> bool:
        """As `ClientSession.changes_files`."""
        return any(member.changes_files for member in self.membership.here)

    def close(self, *, finish: bool = False) -> None:
        """As `ClientSession.close`."""
        self._peer_reconnection.close()
        for member in self.membership.here:
            member.close(finish=finish)


def _joined(errors: Sequence[DjinnError]) -> DjinnError:
    error, *others = errors
    for other in others:
        error.add_note(f"also: {other}")
    return error
