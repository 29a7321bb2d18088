"""Router of a pool: send each executor its part of a submission."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import attrs
import msgspec
import torch

from djinn_client.hookspecs.routers import EMPTY, Executors, JoinedReplies, PendingReply, Router
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.context import context
from djinn_client.runtime.executor_client import ExecutorClient, ExecutorReply, follow_reads
from djinn_client.runtime.planning.plan_maker import report_planned
from djinn_client.runtime.planning.session_planner import new_planner
from djinn_client.runtime.sending.submissions import NO_VALUES
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_client.sink import M, Submission, SubmissionReply
from djinn_core.errors import DeadlineExceeded, DjinnError
from djinn_core.ir.costs import NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.slot_arrays import Words
from djinn_core.ir.stored_tensor import StoredTensor
from djinn_core.ir.stream import ALONE
from djinn_core.system.interrupts import InterruptibleLock, interrupt_mask
from djinn_core.wire.message_base import Message
from djinn_pool import drained_nodes, questions
from djinn_pool.elastic_executors import ElasticExecutors, capabilities_in_pool
from djinn_pool.first_calibration import calibrate_in_background
from djinn_pool.held_uploads import HeldUploads
from djinn_pool.list_ops import ListOps
from djinn_pool.load_balancing import LoadBalancer, ProgramFamily
from djinn_pool.parts import AwaitStep, FreeStep, PooledPlan, RunPart, TransferStep, UploadStep
from djinn_pool.peer_reconnection import PeerReconnection
from djinn_pool.plan_for_pool import PlanningInputs, plan_for_pool, rules_for
from djinn_pool.pool_planner import PoolPlanner
from djinn_pool.relay import Relay
from djinn_pool.routes import Routes
from djinn_pool.topology import PoolTopology
from djinn_pool.value_locations import ValueLocations

UNREAD: Final = 1  # maximum number of unread replies, because link reports in them affect the next plan


@attrs.define
class _ExecutorRequest:
    """Requests to one executor in addition to its parts of the program.

    Attributes:
        fetch: values to send to the client.
        describe: values whose metadata is requested.
        free: values to free before the parts run.
        synchronize: True to reply when all earlier work is done.
    """

    fetch: list[int] = attrs.field(factory=list)
    describe: list[int] = attrs.field(factory=list)
    free: list[int] = attrs.field(factory=list)
    synchronize: bool = False

    def __bool__(self) -> bool:
        return bool(self.fetch or self.describe or self.free or self.synchronize)

    def submission(self, program: Program) -> Submission:
        return Submission(program, tuple(self.free), tuple(self.fetch), tuple(self.describe), self.synchronize)


_ExecutorRequests = defaultdict[int, _ExecutorRequest]  # requests by executor; executors without requests are absent
PendingReplies = list[tuple[Submission, ExecutorReply]]  # answered submissions to executors, with their pending replies


class PoolReply(JoinedReplies):
    """Pending reply to a submission whose values come from several executors."""

    def __init__(
        self,
        submission: Submission,
        parts: Sequence[tuple[Submission, ExecutorReply]],
        router: PoolRouter,
        family: ProgramFamily | None,
        took: Callable[[float], None] | None,
        start_time: float,
    ) -> None:
        """Create a pending reply.

        Args:
            submission: the whole submission.
            parts: submissions to executors with their pending replies.
            router: the pool's router.
            family: family of the submitted program, or None without a program.
            took: called with the seconds from `start_time` until all replies have arrived, or None.
            start_time: time of the submission, by `time.perf_counter`.
        """
        super().__init__(submission, parts)
        self._router, self._alike, self._took = router, family, took
        members = router.executors.members
        self._start_time = start_time
        self._submission_numbers = [(member, member.submissions.last_number) for member in members]
        # number of frames sent to each executor, after whose reply no work is pending
        self._synchronized = tuple([member.link.sent for member in members]) if submission.synchronize else ()
        self._late = submission.later is not None
        self._pending_mark = object()
        if family is not None:
            family.under_way.add(self._pending_mark)

    def wait(self) -> SubmissionReply:
        """Wait for all replies, as `PendingReply.wait`."""
        try:
            reply = super().wait()
        except BaseException:
            if not (self._late and self.waiting):
                self._forget()
            raise
        self._forget()
        if self._synchronized:
            self._router.synchronized = self._synchronized
        if self._took is not None and not self._late:
            self._took(time.perf_counter() - self._start_time)
        return reply

    def note_failure(self, error: DjinnError) -> None:
        """Handle a failure, as `JoinedReplies.note_failure`. A timeout on one executor stops all of them."""
        if isinstance(error, DeadlineExceeded):
            for member in self._router.executors.current:
                member.replies.cancellation.stop_waiting()

    def discard(self) -> None:
        """Discard the replies, as `PendingReply.discard`."""
        self._forget()
        super().discard()

    def mark_unobserved(self) -> None:
        """Report errors of the submissions only if the program uses their results, as `PendingReply.mark_unobserved`."""
        for member, number in self._submission_numbers:
            member.replies.mark_unobserved(number)

    def _forget(self) -> None:
        if self._alike is not None:
            self._alike.under_way.discard(self._pending_mark)


class PoolRouter(Router):
    """Run each program on the executors of a pool by its plan, and track the locations of values."""

    name = "pool"
    preference = 0

    def begin(
        self, executors: Executors[ExecutorClient], existing_values: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Begin the session and measure the links between executors, as `Router.begin`.

        Raises:
            ConfigurationError: a memory limit names a device that does not exist.
            SessionLost: an executor was lost.
        """
        self.executors = executors
        self._tables = InterruptibleLock()  # uploads come from any thread, while another one submits
        self.synchronized: tuple[int, ...] = ()
        self._load_balancer = LoadBalancer(executors)
        self._list_ops = ListOps()
        self._locations = locations = ValueLocations()
        relays: list[Relay] = []
        self._routes = routes = Routes(executors, relays, context.observers)
        self._links = links = PoolTopology(relays, (), ())
        self._uploads = uploads = HeldUploads(executors, locations)
        self._peer_reconnection = peer_reconnection = PeerReconnection(routes.pairs_of)
        before = context.planner, context.growth_intolerant_plugins
        new_planner(context, len(executors.present))
        planning = partial(self._make_plan, unseen=False)
        self._planner = planner = PoolPlanner(planning, context.stats, locations, rules_for(context))
        planner.act_by(self._carry_out, self._free_copies)
        self.elastic = ElasticExecutors(
            executors, relays, locations, planner, routes, links, uploads, peer_reconnection
        )
        try:
            self.elastic.join(executors.present)
        except BaseException:
            peer_reconnection.close()
            context.planner, context.growth_intolerant_plugins = before
            raise
        if existing_values is not None:
            planner.random = 0  # the only executor has drawn all random numbers so far
            for handle, nbytes in existing_values:
                locations.add(handle, 0, nbytes)
            self._free_copies([(value, 0) for value in executors.members[0].submissions.take_derived()])
        self._calibrate()

    def drop_plans(self) -> None:
        """Discard all plans, as `Router.drop_plans`."""
        self._planner.follow(rules_for(context))

    def home(self, storage: int) -> int | None:
        """Return the executor that holds a value, as `Router.home`."""
        return self._locations.homes.get(storage)

    def topology(self) -> NetworkTopology:
        """Return the devices and links, as `Router.topology`."""
        return self._links.topology

    def plan(self, graph: Graph) -> PipelineResult:
        """Plan a program, as `Router.plan`."""
        program = self._list_ops.split(graph.program, self._locations.homes)
        graph = graph if program is graph.program else Graph(program)
        return self._make_plan(graph, self._planner.inputs(graph, ALONE, self._planner.margin), unseen=True)

    def _make_plan(self, graph: Graph, inputs: PlanningInputs, *, unseen: bool) -> PipelineResult:
        """Return the plan of a program, or of a piece of it. `unseen`: True to notify no observers."""
        start = time.monotonic()
        result = plan_for_pool(graph, *context.configured(), self._links.topology, inputs)
        if not unseen:
            report_planned(context, result, len(graph.program), start)
        return result

    def _calibrate(self) -> None:
        registry, settings = context.configured()
        executors = self.executors
        sessions = [executor.opened for executor in executors.current]
        calibrate_in_background(sessions, settings, registry.cost_models, partial(self._use_calibrations, executors))

    def _use_calibrations(self, executors: Executors[ExecutorClient]) -> None:
        """Give measured devices to the links and the planner, if the session is open. Existing plans become outdated."""
        with port.lock:
            session = context.session
            if session is not None and session.executors is executors and not port.forked:
                devices = [capabilities_in_pool(number, executors.members[number]) for number in executors.present]
                self._links.replace_devices(devices)
                self._planner.know_devices(devices)

    def last_profile(self) -> WorkloadProfile | None:
        """Return the profile of the last program, as `Router.last_profile`."""
        return self._planner.last_profile

    # --- executors -----------------------------------------------------------------------------------------------

    def join(self, numbers: Sequence[int]) -> None:
        """Add executors, as `Router.join` does. Meanwhile no thread uploads."""
        with self._tables:
            try:
                self.elastic.join(numbers)
                self._calibrate()
            except BaseException:
                self.elastic.undo_join(numbers)
                raise

    def leave(self, numbers: Sequence[int]) -> None:
        """Remove executors, as `Router.leave` does. Meanwhile no thread uploads.

        Raises: as `ElasticExecutors.leave`.
        """
        with self._tables:
            self.elastic.leave(numbers)

    def watch(self) -> None:
        """Watch the session's connections, as `Router.watch`."""
        drained_nodes.watch()

    # --- sending ---------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> PendingReply:
        """Submit a program, as `Sink.submit`. The caller holds the sink's lock.

        Raises:
            SessionLost: an executor was lost.
        """
        if interrupt_mask.depth:
            return self._submit_masked(submission)
        with interrupt_mask:
            return self._submit_masked(submission)

    def _submit_masked(self, submission: Submission) -> PendingReply:
        for member in self.executors.current:
            member.submissions.make_ready(UNREAD)
        with self._tables:
            submission = self._split(submission)
            planned_program = self._prepare(submission) if submission.program.calls else None
            with interrupt_mask.uninterruptible:  # an interrupt must not leave some executors without their messages
                return self._submit(submission, planned_program)

    def _split(self, submission: Submission) -> Submission:
        if not submission.program.calls or len(self.executors.present) == 1:
            return submission
        program = self._list_ops.split(submission.program, self._locations.homes)
        if program is submission.program:
            return submission
        return msgspec.structs.replace(submission, program=program)

    def _submit(
        self, submission: Submission, prepared: tuple[ProgramFamily, PooledPlan, Sequence[int]] | None
    ) -> PendingReply:
        pending: PendingReplies = []
        took: Callable[[float], None] | None = None
        family: ProgramFamily | None = None
        members = self.executors.members
        begun = time.perf_counter()
        if prepared is not None:
            family, plan, values = prepared
            if family.trial is not None and not any(member.replies.pending for member in self.executors.current):
                took = family.clock()  # otherwise the reply would wait for earlier work
            requests = self._requests(submission, self._record_locations(plan, values))
            if self._planner.derived.values.has_values:
                handles = [values[i] for i in plan.written]
                self._forget_derived(requests, submission.free, submission.program.dead, handles)
            pending = self._run_parts(plan, values, submission, requests)
            if plan.dead and self._uploads:  # values that no running part has used
                self._uploads.drop([values[i] for i in plan.dead])
        else:
            requests = self._requests(submission, [])
            if self._planner.derived.values.has_values:
                self._forget_derived(requests, submission.free)
            self._follow_reads(submission)
        for executor in self.executors.present if requests else ():
            request = requests[executor]
            if request.synchronize and members[executor].link.sent in self.synchronized[executor : executor + 1]:
                request.synchronize = False  # the executor has received no message since its last reply
            if request:
                pending += self._send_request(executor, request)
        if submission.later is not None:
            for _, reply in pending:
                reply.replies.deferred.defer(reply.number, submission.later)
        return (
            PoolReply(submission, pending, self, family, took, begun)
            if submission.is_answered
            else JoinedReplies(submission, pending)
        )

    def _prepare(self, submission: Submission) -> tuple[ProgramFamily, PooledPlan, Sequence[int]]:
        """Plan a program. Return its family, its plan, and its values by the plan's numbers."""
        planner, program = self._planner, submission.program
        planner.link_changes = self._links.process_reports()
        family, values = planner.find(program)
        plan, run_values = planner.prepare(program, family, values, self._load_balancer.propose(family))
        family.record_run(plan, run_values)
        return family, plan, run_values

    def _carry_out(self, plan: PooledPlan, program: Program) -> None:
        values = tuple(dict.fromkeys(program.operands))
        with interrupt_mask.uninterruptible:
            self._record_locations(plan, values)
            self._run_parts(plan, values, Submission(program), defaultdict(_ExecutorRequest))

    def _free_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        """Free copies of values on executors. `copies`: pairs of value and executor."""
        with interrupt_mask.uninterruptible:
            for executor in {executor for _, executor in copies}:
                self._send_request(executor, _ExecutorRequest(free=[v for v, where in copies if where == executor]))

    def _forget_derived(self, requests: _ExecutorRequests, *touched: Iterable[int]) -> None:
        """Add requests that free derived values whose weights were written or freed.

        Args:
            requests: the requests to extend.
            touched: values that were written or freed.
        """
        derived_values = self._planner.derived.values
        derived_values.invalidate([*itertools.chain(*touched)])
        for executor, freed in self._locations.forget(derived_values.take_stale()).items():
            requests[executor].free += freed

    def _record_locations(self, plan: PooledPlan, values: Sequence[int]) -> list[tuple[int, int]]:
        """Record the locations of values after a run of `plan`. Return outdated copies, as pairs of value and executor.

        `values`: the run's values, by the plan's numbers.
        """
        locations = self._locations
        for (
            i,
            executor,
        ) in plan.moved:  # must precede the end of copies: a copy that the memory moves to becomes the home
            locations.move(values[i], executor)
        stale = locations.end_copies([values[i] for i in plan.written]) if plan.written else []
        locations.add_all(values, plan.made)
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
        for executor in self.executors.present if submission.synchronize else ():
            requests[executor].synchronize = True
        for value in submission.fetch:
            requests[self._home(value)].fetch.append(value)
        for value in submission.describe:
            requests[self._home(value)].describe.append(value)
        for value, executor in stale:
            requests[executor].free.append(value)
        if submission.free:
            self._uploads.drop(submission.free)
            for executor, freed in self._locations.forget(submission.free).items():
                requests[executor].free += freed
        return requests

    def _home(self, value: int) -> int:
        """Return the executor that holds a value, or that will hold it when the plan has run.

        If the value is a deferred upload that the plan does not send, send it now.
        """
        homes, storage = self._locations.homes, storage_of(value)
        if storage not in homes and value in self._uploads:
            self._place(value)
        home = homes.get(storage)
        return (
            home if home is not None else self.executors.present[0]
        )  # that executor replies that it has no such value

    def _place(self, value: int) -> None:
        executor = self._uploads.executor_with_space(value)
        self._locations.add(value, executor, self._uploads.give(value, executor))
        self._locations.given.add(storage_of(value))

    def _run_parts(
        self, plan: PooledPlan, values: Sequence[int], submission: Submission, requests: _ExecutorRequests
    ) -> PendingReplies:
        """Send each executor its parts of the program, and return the pending replies.

        Remove from `requests` the requests that can be attached to the last part of their executor.
        """
        pending: PendingReplies = []
        begun = self._begin_reads(plan, values) if plan.uploads and self._uploads.reads else ()
        for index, part in enumerate(plan.parts):
            if index in begun:
                continue
            if not isinstance(part, RunPart):
                self._run_step_between(part, values)
                continue
            self._follow_reads(submission)
            executor = part.executor
            last = plan.last_runs.get(executor) == index
            request = (requests.pop(executor, None) if last else None) or _ExecutorRequest()
            if part.free:
                request.free += [values[i] for i in part.free]
            pending += self._run(executor, request.submission(submission.program), part.prepared, values)
        return pending

    def _begin_reads(self, plan: PooledPlan, values: Sequence[int]) -> set[int]:
        """Make all executors start to read the program's stored weights before any of them computes.

        Return the indexes of the steps that were done. A read after a free on the same executor is not done early, because
        it may need the freed memory.
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
                self._run_step_between(part, values)
                begun.add(index)
        return begun

    def _follow_reads(self, submission: Submission) -> None:
        members = self.executors.current
        if any(member.unread for member in members):
            follow_reads(members, context.observers, submission)

    def _run_step_between(self, part: UploadStep | TransferStep | AwaitStep | FreeStep, values: Sequence[int]) -> None:
        """Send the message of a step that runs no ops. `values`: the run's values, by the plan's numbers."""
        if isinstance(part, UploadStep):
            self._uploads.give(values[part.value], part.executor)
            self._locations.given.add(storage_of(values[part.value]))
        elif isinstance(part, TransferStep):
            self._routes.ship(part, values[part.value])
        elif isinstance(part, AwaitStep):
            self._routes.expect(part.carry, values[part.carry.value])
        else:
            self._send_request(part.executor, _ExecutorRequest(free=[values[i] for i in part.values]))

    def _send_request(self, executor: int, request: _ExecutorRequest) -> PendingReplies:
        return self._run(executor, request.submission(EMPTY))

    def _run(
        self,
        executor: int,
        submission: Submission,
        prepared: PreparedTemplate | None = None,
        values: Sequence[int] | Words = NO_VALUES,
    ) -> PendingReplies:
        """Send an executor its part of a submission. Return a list of its pending reply, empty if none is requested."""
        member = self.executors.members[executor]
        number = member.submissions.run(submission, prepared, values)
        if not submission.is_answered:
            return []
        self._load_balancer.record_request(executor, number)
        return [(submission, ExecutorReply(member.replies, number))]

    def upload(self, handle: int, source: torch.Tensor | StoredTensor, device: int = 0) -> None:
        """Upload a value, as `Sink.upload` does.

        With `device` 0, defer the upload until a plan chooses an executor. Otherwise send it to the device with this index.
        """
        for member in self.executors.current:
            member.link.check()
        source = source if device or isinstance(source, StoredTensor) else source.detach().clone()
        with interrupt_mask.uninterruptible, self._tables:
            self._locations.forget((handle,))  # a session with one executor has already recorded it as present
            if device:
                executor = self.executors.number_at(device)
                self.executors.members[executor].upload(handle, source)
                self._locations.add(handle, executor, source.nbytes)
                self._locations.given.add(storage_of(handle))
                return
            for oldest in self._uploads.hold(handle, source):
                self._place(oldest)

    def expect(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing, because an announcement of uploads (`Sink.expect`) saves nothing in a pool, which copies each upload."""

    def ask(self, message: Message, kind: type[M], device: int = 0) -> M:
        """Ask executors, as `Sink.ask`."""
        return questions.ask(message, kind, device, self.executors, self._locations)

    def close(self) -> None:
        """Close all sessions, as `Router.close`."""
        self._peer_reconnection.close()
