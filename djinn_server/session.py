"""A client's session on an executor: its values, its templates, and the handlers of its messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from djinn_core.errors import ProtocolError, QuotaExceeded, TransportError, UnsupportedOperation
from djinn_core.hookspecs.transports import Frame
from djinn_core.ir.handles import storage_of
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import Handles, unpack_handles
from djinn_core.wire.cache_messages import CacheReply, CacheRequest
from djinn_core.wire.cancel_messages import CancelSubmissions, RepeatOutcome
from djinn_core.wire.message_base import Failure, Message
from djinn_core.wire.messages import (
    Completed,
    Goodbye,
    InitialBindings,
    StatsReply,
    StatsRequest,
    Submit,
    Template,
    TemplateReply,
    TemplateRequest,
    Timing,
    ValueHints,
    encode,
)
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.state_messages import StateHeader, StateRequest
from djinn_core.wire.templates import TEMPLATES_LIMIT, TemplateCache, digest_of
from djinn_core.wire.timing_messages import ExecutionTimes, TimingsReply, TimingsRequest
from djinn_core.wire.upload_messages import (
    AbortUpload,
    BlobHit,
    BlobNeeded,
    BlobOffer,
    BlobQuery,
    BlobQueryReply,
    UploadPart,
)
from djinn_core.wire.weight_messages import (
    OpenWeights,
    PublishedRequest,
    ReadProgressReply,
    ReadProgressRequest,
    ReadWeights,
    RemoveWeights,
    SaveWeights,
    SmallFilesRequest,
)
from djinn_server.context import ExecutorContext
from djinn_server.devices import device_figures, reset_device_peak
from djinn_server.handshake import instance
from djinn_server.idle import IdleMoves
from djinn_server.lane_group import LaneGroup, LaneRun, ReplySender, Send
from djinn_server.malformed import (
    Unreadable,
    UnreadableSubmit,
    UnreadableTemplate,
    UnreadableUpload,
)
from djinn_server.memory.room import RoomReport, is_shortage
from djinn_server.memory.session_memory import SessionMemory
from djinn_server.memory.spill import DISK, HOST
from djinn_server.peers.device_memory import DeviceMemory
from djinn_server.peers.exchange import PeerExchange, PeerListener
from djinn_server.peers.packed_values import can_move, host_memory
from djinn_server.peers.session_values import PeerValues
from djinn_server.recovery.executor_channel import NO, YES, ExecutorChannel
from djinn_server.recovery.journal import StateParts
from djinn_server.recovery.log_records import PoolCounts
from djinn_server.recovery.snapshot_format import (
    KnownTemplate,
    Snapshot,
    StoredValue,
    decode_snapshot,
    encode_snapshot,
    put_values,
    take_values,
)
from djinn_server.recovery.state_migration import receive_state, restore_received, state_frames
from djinn_server.request_times import ModelTimes, RequestTimes
from djinn_server.running.bound_templates import BoundTemplate, begin, bind, bind_copy
from djinn_server.running.cancellation import CancellationState
from djinn_server.running.device_turn import DeviceTurn
from djinn_server.running.fair_share import Steps
from djinn_server.running.growing import copied_bytes
from djinn_server.running.random_state import state_from_bytes, state_to_bytes
from djinn_server.running.responses import FailureTexts, Responses
from djinn_server.running.run import RunOutcome
from djinn_server.running.run_request import CANCEL, RunRequest, unpack
from djinn_server.running.template_compiler import CompiledTemplate, compile_template
from djinn_server.running.timings import OpTimes, Timings
from djinn_server.running.values import Poison, ValueTable
from djinn_server.session_loop import SessionLoop
from djinn_server.session_machine import TEMPLATE, Wait
from djinn_server.session_metrics import EVERY_SESSION, SessionCounters, SessionGauges
from djinn_server.session_overview import SessionNotes, SessionOverview
from djinn_server.session_pauses import BRIEF_SECONDS, Pause, Wakeup, clamp_timeout, serve_here
from djinn_server.session_runs import SessionRuns
from djinn_server.usage_metrics import Holdings
from djinn_server.value_kinds import KINDS
from djinn_server.weights.reads import WeightReads
from djinn_server.weights.replies import (
    answer_once,
    answer_opening,
    list_published,
    remove,
    save_values,
    small_files,
)
from djinn_server.weights.shared_weights import stored_value
from djinn_server.weights.store import WeightStore
from djinn_server.weights.uploads import UploadAssembly, place_part

_log = get_logger("djinn.server")
# Unsolicited replies must be small: a client that is sending does not read them.
BRIEF_BYTES = 1 << 16  # of the largest reply body that the leader of `SessionThreads` sends itself


class ExecutorSession:
    """Serve one client. All its values and templates are freed at the end."""

    def __init__(
        self, context: ExecutorContext, store: WeightStore | None = None, peer_listener: PeerListener | None = None
    ) -> None:
        """`store`: the tenant's weight store, if any. `peer_listener`: admits other executors."""
        self._context, self._usage = context, context.usage
        self.device = device = context.device
        self.values = ValueTable()
        self.submissions = 0
        self._turn = device.turns.share(self._usage.charge, context.threads.promote_follower)
        self._reply_bytes = 0  # limit of one reply's body
        self._rounded = False  # True once a strategy computed results that differ from those of the ops by rounding
        self._timings: Timings | None = None  # set while the client requests timings
        self._templates: TemplateCache[BoundTemplate] = TemplateCache(TEMPLATES_LIMIT)
        self._uploads = UploadAssembly(device.runtime, self.values, store)
        self.wakeup = Wakeup()
        self._uploads.names = names = device.names if device.arbiter.caches_results else None
        self._reads = WeightReads(device.runtime, self.values, self._uploads, context.weights, self.wakeup, names)
        memory = DeviceMemory(device.runtime, device.turns)
        self.exchange = PeerExchange(peer_listener or PeerListener(), memory, self.wakeup)
        self._cancellation = CancellationState(self._turn, self._usage, self.wakeup)
        self._ran_concurrently = False  # True if submissions ran concurrently in the last group
        self._loop = SessionLoop(self, self._reads, self._cancellation, context.threads, context.idle_seconds)
        self._peer_values = PeerValues(
            context,
            self.values,
            self.exchange,
            self._reads.shares,
            self._turn,
            self._loop.next_frame,
            self._await_uploads,
        )
        self._room = RoomReport(device.runtime)
        self._counts = SessionCounters()
        shares, templates = self._reads.shares, self._templates
        self._notes = SessionNotes(self.values, at_once=device.ledger is not None)
        kinds = self._notes.kinds
        self._runs = runs = SessionRuns(
            context, self._turn, self.values, kinds, shares, templates, self._cancellation, self._counts
        )
        self._memory = runs.memory
        self._idle = IdleMoves(context, self._memory)
        self._requests = RequestTimes(self._usage.model_names)
        self._has_observer = context.events.wants("completed")
        self._usage.enter(self)

    def serve(self, connection: ExecutorChannel) -> None:
        """Serve the session in the calling thread."""
        self._loop.is_pooled = False
        serve_here(self.pauses(connection), self.wakeup)

    def pauses(self, connection: ExecutorChannel) -> Iterator[Pause]:
        """Answer messages until the client sends `Goodbye`. Yield a pause whenever there is nothing to do.

        `Goodbye` cancels running work, unless the client asks to finish it.

        Raises:
            TransportError: the connection ended without a goodbye.
            ProtocolError: the client sent an invalid message.
        """
        journal, past = connection.journal, connection.journal.past
        self._reply_bytes = connection.limits.body
        self._uploads.journal = self._reads.journal = journal
        snapshot = decode_snapshot(past.base.state) if past is not None and past.base is not None else None
        self.exchange.begin(journal, snapshot.pool if snapshot is not None else PoolCounts())
        if past is not None and snapshot is not None:
            self._restore(snapshot, past.memory())
        self._cancellation.journal = journal
        if self.device.runtime.device.type != "cpu":
            connection.place_bodies(partial(place_part, self.device.runtime))
        connection.call_when_changed(self.wakeup)
        with self._context.threads.polling(self._cancellation, connection):
            yield from self._loop.pauses(connection)

    def begin(
        self, message: Message | Unreadable, frame: Frame, connection: ExecutorChannel, started: float
    ) -> Iterator[Wait] | None:
        """Begin to handle a message, as `MessageHandlers.begin` does."""
        self._idle.next_move_at = None
        if type(message) is Submit:
            if frame.body:
                self._usage.count("received_bytes", sum(map(len, frame.body)))
            if self._usage.quota.requests_a_second:
                self._context.threads.promote_follower()
                self._usage.pace()
            return self._submit(message, connection, started)
        return self._handle(message, frame, connection)

    def receive_ahead(self, connection: ExecutorChannel) -> Frame | None:
        """Run ahead until a frame arrives, as `MessageHandlers.receive_ahead` does."""
        ahead = self._runs.ahead
        if ahead is None or not ahead.ready or self._timings is not None:
            return None
        return ahead.receive(connection, self._runs.numeric_settings)

    @property
    def brief_use(self) -> float | None:
        """Return the session's device seconds so far; None if its turns are long or a speculative run is pending."""
        is_brief = self._turn.is_brief and (self._runs.ahead is None or not self._runs.ahead.pending)
        return self._turn.used_seconds if is_brief else None

    def between_messages(self, connection: ExecutorChannel) -> None:
        """Do work between messages, as `MessageHandlers.between_messages` does."""
        if connection.journal.snapshot_if_due(connection.at_rest, self._local_state, self.exchange.inbox.journal_lock):
            self._usage.count("journal_snapshots")

    def idle_deadline(self) -> float | None:
        """Move the idle session's values off the device if it is time. Return the time of the next move, if any."""
        return self._idle.deadline()

    def take_at_once(self, message: Message | Unreadable, frame: Frame) -> None:
        """Handle a message out of order, as `MessageHandlers.take_at_once` does."""
        if isinstance(message, UnreadableUpload):
            self._refuse_upload(message)
            return
        self._usage.count_message(type(message).__name__, sum(map(len, frame.body)))
        if isinstance(message, UploadPart):
            self._usage.check_values()
            self._uploads.take_or_refuse(message, frame.body)
        elif isinstance(message, AbortUpload):
            self._usage.check_values()
            self._uploads.withdraw(message.handle)
        elif isinstance(message, CancelSubmissions):
            self._cancellation.stop(message.submissions)

    def _await_uploads(self) -> Iterator[Wait]:
        """Wait until all offered uploads and all weight reads are complete."""
        yield self._reads.wait()
        yield self._uploads.wait()

    def _refuse_upload(self, message: UnreadableUpload) -> None:
        """Poison the value of an unreadable upload."""
        _log.warning("skipped an unreadable message of a client", reason=message.reason)
        self._uploads.refuse(message.handle, message.reason)

    def _handle(
        self, message: Message | Unreadable, frame: Frame, connection: ExecutorChannel
    ) -> Iterator[Wait] | None:
        """Handle a message other than a submission. Return the handler's waits, or None if it never waits."""
        if not isinstance(message, UploadPart):  # an upload only creates new values
            self._runs.drop_runs_ahead()
        if isinstance(message, UploadPart | AbortUpload | CancelSubmissions):
            self.take_at_once(message, frame)
            return None
        self._usage.count_message(type(message).__name__.removeprefix("Unreadable"), sum(map(len, frame.body)))
        if isinstance(message, Unreadable):
            return self._skip_unreadable(message, connection)
        if isinstance(message, BlobOffer):
            self._usage.check_values()
            is_stored = connection.journal.decide(lambda before: self._find_blob(message, before)) == YES
            connection.send(Frame(encode((BlobHit if is_stored else BlobNeeded)(message.handle))))
        elif isinstance(message, OpenWeights):
            return answer_opening(message, self._context.weights, connection, self.wakeup)
        elif isinstance(message, ReadProgressRequest):
            return self._report_reads(message, connection)
        elif isinstance(message, ReadWeights):
            self._read_weights(message)
        elif isinstance(message, SaveWeights):
            return self._save_weights(message, connection)
        elif isinstance(message, PublishedRequest):
            connection.send(Frame(encode(list_published(self._context.weights.published))))
        elif isinstance(message, SmallFilesRequest):
            connection.send(Frame(encode(small_files(self._context.weights, message))))
        elif isinstance(message, RemoveWeights):
            answer_once(connection, lambda again: remove(self._context.weights, message, again))
        elif isinstance(message, ValueHints):
            self._notes.learn(message)
        elif isinstance(message, BlobQuery):
            present = connection.journal.decide(lambda before: self._uploads.hold(message, before))
            connection.send(Frame(encode(BlobQueryReply(tuple(map(bool, present))))))
        elif isinstance(message, StatsRequest):
            self._send_figures(message, connection)
        elif isinstance(message, TimingsRequest):
            self._set_timings(message)
            connection.send(Frame(encode(TimingsReply(instance(), time.perf_counter()))))
        elif isinstance(message, CacheRequest):
            connection.send(Frame(encode(self._control_caches(message))))
        elif isinstance(message, RepeatOutcome):
            self._cancellation.outcome_to_repeat = message
        elif isinstance(message, NumericSettings):
            self._runs.numeric_settings = message
        elif isinstance(message, StateRequest):
            frames = state_frames(self._state, self.values.nbytes(), message.limit)
            return connection.send_each(frames)
        elif isinstance(message, StateHeader):
            return self._take_over(message)
        elif isinstance(message, Goodbye):
            self._loop.machine.left()
        else:
            return self._peer_values.answer(message, connection, self._timings, self.submissions)
        return None

    def _send_figures(self, request: StatsRequest, connection: ExecutorChannel) -> None:
        figures = self.figures()
        if request.reset_peak:
            self.values.reset_peak()
            if self.device.ledger is not None:
                self.device.ledger.reset_peaks()
            reset_device_peak(self.device.runtime.device)
        templates = self._templates.entries() if request.decisions else ()
        decisions = tuple([decision for _, template in templates for decision in template.decisions()])
        connection.send(Frame(encode(StatsReply(figures, decisions))))

    def _set_timings(self, request: TimingsRequest) -> None:
        """Start or stop reporting times with each reply."""
        self._timings = Timings(instance(), ops=request.ops) if request.on else None

    def _control_caches(self, request: CacheRequest) -> CacheReply:
        """Pin, unpin, evict or restore KV caches. On a device without a memory limit, only report their bytes."""
        handles = unpack_handles(request.handles)
        with self._turn:
            if self._memory is not None:
                return self._memory.caches(request.action, handles)
            nbytes = sum(self.values.bytes_of(storage) for storage in {storage_of(handle) for handle in handles})
        return CacheReply(nbytes, nbytes, 0, False)

    def _find_blob(self, offer: BlobOffer, before: bytes | None) -> bytes:
        """Return `YES` if the store has an offered blob or the offer is invalid, else `NO`.

        `before`: in a replay, the logged answer; else None. A blob that was missing counts as missing again.
        """
        try:
            return YES if self._uploads.accept_offer(offer, look_up=before != NO) else NO
        except ProtocolError as error:
            self._uploads.refuse(offer.handle, str(error))
            return YES

    def _state(self) -> StateParts | None:
        """Return the session's state, or None if it cannot be serialized now or has entries in `Snapshot.promised`."""
        return None if self._uploads.promised else self._state_without(())

    def _local_state(self) -> StateParts | None:
        """Return the state for a recovery here; None if not serializable now. Unmodified weights stay in files."""
        self._context.threads.promote_follower()
        stored_weights = self._reads.shares.unmodified()
        versions = {origin.key.version for _, _, origin in stored_weights}
        self._reads.hold_only(versions.union([digest for digest, _ in self._uploads.promised]))
        return self._state_without(tuple([stored_value(*entry) for entry in stored_weights]))

    def _state_without(self, stored: tuple[StoredValue, ...]) -> StateParts | None:
        memory = self._memory
        if len(self._loop.machine) or self._uploads.busy or self._runs.limited:
            return None
        with self._turn, contextlib.nullcontext() if memory is None else memory.lock:
            if memory is not None and not self._restore_evicted(memory):
                return None
            fields = take_values(self.values, self._host_memory, frozenset([value_.handle for value_ in stored]))
            random = state_to_bytes(self.device.randomness.state_of(self._runs.randomness))
        if fields is None:
            return None
        bound_templates = [value for _, value in self._templates.entries()]
        templates = tuple(
            KnownTemplate(k.digest, k.template.source, tuple(k.slots), tuple(k.inputs), k.workload)
            for k in bound_templates
        )
        counts, transfers = self.exchange.state()
        settings = self._runs.numeric_settings
        snapshot = Snapshot(
            self.submissions,
            templates,
            random=random,
            pool=counts,
            numeric_settings=settings,
            stored=stored,
            promised=self._uploads.promised,
            timings=TimingsRequest(ops=self._timings.ops) if self._timings is not None else None,
            **fields[0],
        )
        return encode_snapshot(snapshot), fields[1], transfers

    def _restore_evicted(self, memory: SessionMemory) -> bool:
        """On a CPU, restore the evicted values of an idle session. Return True if no value is evicted afterwards."""
        try:
            if self.device.runtime.device.type == "cpu":
                memory.restore_all()
        except (RuntimeError, OSError) as error:
            _log.warning("values of an idle session cannot be restored", error=str(error))
        return not memory.evicted_to()

    def _host_memory(self, value: torch.Tensor) -> memoryview:
        with self._turn:
            return host_memory(value, self.device.runtime)

    def _take_over(self, state: StateHeader) -> Iterator[Wait]:
        """Continue the session of a lost server from the state that the client stored.

        Raises:
            ProtocolError: this session has already begun, or the state is invalid.
        """
        if self.submissions or len(self.values) or len(self._templates):
            raise ProtocolError("a client sent its state to a session that has already begun")
        snapshot, memory = yield from receive_state(state, self._loop.next_frame)
        restore_received(self._restore, snapshot, memory)
        self._usage.check_values()

    def _restore(self, snapshot: Snapshot, memory: Sequence[memoryview]) -> None:
        """Set the values, templates and settings of this session from another session's state."""
        self.submissions = snapshot.submissions
        self._runs.numeric_settings = snapshot.numeric_settings
        if snapshot.timings is not None:
            self._set_timings(snapshot.timings)
        for template in snapshot.templates:
            # Not shared with other sessions, because the digest is the client's claim.
            bound = self._runs.bind(self._compile(template.template), template.digest)
            begin(bound, template.slots, template.inputs)
            bound.workload = template.workload
            self._templates.put(template.digest, bound, len(template.template.code))
        if snapshot.promised:
            digests, sizes = zip(*snapshot.promised, strict=True)
            self._uploads.hold(BlobQuery(sizes, digests))
        with self._turn:
            put_values(snapshot, memory, self.values, self.device.runtime)
            self._reads.read_again(snapshot.stored)
            self.device.randomness.restore(self._runs.randomness, state_from_bytes(snapshot.random))

    def _submit(self, submit: Submit, connection: ExecutorChannel, started: float) -> Iterator[Wait]:
        self._count_submission(submit)
        work = unpack(submit)
        decoded = waited = time.perf_counter()
        if self._uploads.wanted:
            yield self._uploads.wait()
            waited = time.perf_counter()
        try:
            if work.unreadable:
                raise _Refused(ProtocolError(work.unreadable), submit.first)
            bound = yield from self._find_template(submit, work, connection)
            if bound is None or bound.seconds >= BRIEF_SECONDS:
                self._context.threads.promote_follower()
        except _Refused as refused:
            self._usage.count_refused()
            if self._has_observer:
                self._notify_completed(submit, Timing(), 1)
            yield self._reads.wait()
            self._refuse(work, refused, submit.digest, connection)
            return
        self._cancellation.begin(work)
        if self._reads.reading:
            yield from self._await_operands(bound, work)
            waited = time.perf_counter()
        turn = DeviceTurn(bound, work, submit, bound.slots if bound is not None else (), started, decoded, waited)
        connection.copy_borrowed()  # the submission may write memory that unsent replies borrow
        if (group := self._lane_group(turn, connection)) is not None:
            self._run_in_lanes(group, connection)
            return
        if bound is not None and bound.joint is not None:
            timed = self._timings is not None and self._timings.ops
            turn.pending = self._runs.joinable(bound, bound.joint, work, timed=timed)
        self.device.turns.run(self._turn, self._compute(turn), turn.pending)
        self._wait(turn)
        self._answer(turn, self.device.turns.take_seconds(self._turn), connection, connection.send)

    def _lane_group(self, turn: DeviceTurn, connection: ExecutorChannel) -> LaneGroup | None:
        """Return a group that begins with this submission, or None if the next one cannot join or probably will not."""
        if turn.bound is None or (access := self._runs.access(turn.bound, turn.work)) is None:
            return None
        group = LaneGroup(self.device, self._runs, self.values.lock)
        group.add(turn, access)
        has_joined = self._join(group, connection)
        return group if has_joined or (has_joined is None and self._ran_concurrently) else None

    def _run_in_lanes(self, group: LaneGroup, connection: ExecutorChannel) -> None:
        """Run and answer the submissions of a group, and independent submissions that arrive meanwhile."""
        with ReplySender(connection) as sender:
            answer = partial(self._answer_lane, connection, sender.send)
            steps = group.steps(partial(self._join, group, connection), self._begin_reply, answer, sender)
            self.device.turns.run(self._turn, steps)
        self.device.turns.take_seconds(self._turn)  # `LaneRun.seconds` has them
        self._ran_concurrently = group.ran_concurrently
        for run in group.unsent_runs:
            self._answer_lane(connection, connection.send, run)

    def _answer_lane(self, connection: ExecutorChannel, send: Send, run: LaneRun) -> None:
        self._wait(run.turn)
        self._answer(run.turn, run.seconds, connection, send)

    def _join(self, group: LaneGroup, connection: ExecutorChannel) -> bool | None:
        """Add the next message to a group. Return False if it may not join, None if no message has arrived."""
        quota = self._usage.quota  # it may refuse a submission after earlier ones have ended
        if quota.requests_a_second or quota.values or quota.seconds_an_hour or self._timings is not None:
            return False
        with self.values.lock:  # an upload may arrive
            submit = self._loop.peek(connection)
        waits = self._uploads.wanted or self._reads.reading or self._cancellation.client_left.is_set()
        if type(submit) is not Submit or waits:
            return None if submit is None else False
        bound = self._templates.get(submit.digest) if submit.digest else None
        if (bound_copy := bind_copy(bound, submit)) is None:
            return False
        copy, work = bound_copy
        access = self._runs.access(copy, work)
        if access is None or not group.admits(access):
            return False
        self._loop.machine.pop()
        self._count_submission(submit)
        if bound is not None and copy is not None:
            bound.slots, bound.inputs = copy.slots, copy.inputs
            self._counts.template_cache_hits += 1
        self._cancellation.begin(work)
        now = time.perf_counter()
        group.add(DeviceTurn(bound, work, submit, () if copy is None else copy.slots, now, now, now), access)
        return True

    def _answer(self, turn: DeviceTurn, seconds: float, connection: ExecutorChannel, send: Send) -> None:
        """Send the reply to a submission that has run. `seconds`: its device time."""
        bound, work, submit, pending = turn.bound, turn.work, turn.submit, turn.pending
        started, decoded, waited = turn.started, turn.decoded, turn.waited
        timings, values = self._timings, self.values
        done, begun, run, responses = time.perf_counter(), turn.begun, turn.outcome, turn.responses
        values.peak_bytes = max(values.peak_bytes, values.held_bytes)
        if work.free and turn.freed != {*work.free}:
            values.free(work.free)
        if self._reads.reading:
            self._reads.forget(work.free)
        if self._reads.shares.storages:
            self._reads.shares.forget([*work.free, *(bound.consumed(work.inputs) if bound is not None else ())])
        if pending is not None:
            begun = self._runs.after_turn(bound, pending, seconds) or begun
        self._rounded |= run.may_round_differently
        pressure = self.device.ledger.pressure.level if self.device.ledger is not None else 0
        timing = Timing(
            begun - waited + work.paused_seconds, decoded - started, seconds, done - turn.executed, pressure
        )
        if bound is not None:
            self._notes.ran(bound.digest, work.inputs, work.outputs, seconds)
            bound.seconds = min(seconds, 2.0 * bound.seconds)  # one run may be interrupted
            self._turn.is_brief = self._runs.alone and bound.seconds < BRIEF_SECONDS
        ops = bound.template.count if bound else 0, run.native_ops
        self._usage.completed(timing, ops, run.failures, responses.body)
        workload = bound.workload if bound is not None else None
        self._requests.ran(workload, started, done, answers=bool(responses.body))
        if run.layout_mismatches:
            self._counts.layout_corrections += len(run.layout_mismatches)
        if self._has_observer:
            self._notify_completed(submit, timing, len(run.failures))
        failures = run.reported_failures() if run.failures else ()
        for failure in failures:
            _log.info("an op failed", submission=submit.sequence, op=failure.op, kind=failure.kind)
        outcome = tuple(responses.results), tuple(responses.descriptions), failures, tuple(run.layout_mismatches)
        times: ExecutionTimes | None = None
        if timings is not None:
            if self.device.timer.runs_late:  # the device ran the ops after they were issued
                begun = max(begun, turn.executed - seconds)
            moments = {"taken": started, "ready": waited, "begun": begun, "executed": turn.executed, "done": done}
            op_times = work.op_times.pack(bound.template.count) if bound is not None and work.op_times else b""
            times = timings.times(moments, self.values.held_bytes, op_times)
        links = tuple(self.exchange.link_measurements.take()) if self.exchange.link_measurements.measurements else ()
        room = self._room.due(values.held_bytes, run.failures) if failures or done >= self._room.next else None
        shortages = tuple([f.instruction for f in run.failures if is_shortage(f)][: limits.STOPS]) if failures else ()
        reply = Completed(submit.sequence, *outcome, timing, links, room, times, run.stopped_at, shortages)
        if responses.body and sum(map(len, responses.body)) > BRIEF_BYTES:
            self._context.threads.promote_follower()  # the client may not read
        log = connection.journal.rounded if self._rounded else connection.journal.checked
        send(log(Frame(encode(reply), responses.body)))
        if self._runs.ahead is not None:
            self._runs.ahead.add(submit, bound, work, seconds)

    def _compute(self, turn: DeviceTurn) -> Steps:
        """Run a submission on the device, and start copies of the values that it fetches."""
        bound, work = turn.bound, turn.work
        turn.begun = time.perf_counter()
        if self._timings is not None and self._timings.ops and bound is not None:
            work.op_times = OpTimes(self.device.timer)
        if work.free and not self._runs.limited:  # makes room for the run; with a limit, the ledger does
            turn.freed = {*work.free}.difference(work.inputs, work.outputs, work.fetch, work.describe)
            self.values.free(turn.freed)
        turn.outcome = run = yield from self._runs.run(bound, work, turn.pending)
        turn.executed = time.perf_counter()
        if work.synchronize and not self.device.timer.runs_late:
            _synchronize(self.device.runtime, work, run)
        self._begin_reply(turn)

    def _begin_reply(self, turn: DeviceTurn) -> None:
        """Issue the copies of the values that a submission fetches, after its ops."""
        self._cancellation.end(turn.work, turn.outcome)
        turn.responses = Responses.start(turn.work, self.values, self.device.runtime, self._reply_bytes, self._counts)

    def _wait(self, turn: DeviceTurn) -> None:
        """Wait for a submission's ops and copies after its turn on the device."""
        work, run, watch = turn.work, turn.outcome, self.device.watch
        if self.device.timer.runs_late and (work.synchronize or self._timings is not None):
            _synchronize(self._turn.end_event or self.device.runtime, work, run)
            turn.executed = time.perf_counter()
        turn.responses.finish()
        if watch is not None:  # a lost device must end the process before the client receives errors that it caused
            watch.check_failures((*run.failures, *turn.responses.results), self._cancellation)
            if work.fetch or work.synchronize:
                watch.completed()

    def _count_submission(self, submit: Submit) -> None:
        """Check a submission's number, and count the submission. Afterwards, the session must answer it.

        Raises:
            ProtocolError: the number is not one more than the last number.
            QuotaExceeded: the tenant's quota is exhausted.
        """
        if submit.sequence != self.submissions + 1:
            raise ProtocolError(f"submission {submit.sequence} arrived after submission {self.submissions}")
        usage = self._usage
        if usage.quota.values or usage.quota.seconds_an_hour:
            usage.check()
        self.submissions = submit.sequence

    def _notify_completed(self, submit: Submit, timing: Timing, failures: int) -> None:
        """Notify observers of a finished or refused submission."""
        self._context.events.emit(
            "completed",
            submission=submit.sequence,
            failures=failures,
            queue=timing.queue,
            decode=timing.decode,
            duration=timing.execute,
            encode=timing.encode,
            trace=submit.trace,
        )

    def _skip_unreadable(self, message: Unreadable, connection: ExecutorChannel) -> Iterator[Wait]:
        """Skip an unreadable message, and poison its results."""
        if isinstance(message, UnreadableUpload):
            self._refuse_upload(message)
            if message.offered:  # an offer needs a reply
                connection.send(Frame(encode(BlobHit(message.handle))))
            return
        _log.warning("skipped an unreadable message of a client", reason=message.reason)
        if isinstance(message, UnreadableSubmit):
            self._count_submission(message.submit)
            work = unpack(message.submit)
            yield from self._await_uploads()
            refusal = _Refused(ProtocolError(message.reason), message.submit.first)
            self._refuse(work, refusal, message.submit.digest, connection)
        elif isinstance(message, UnreadableTemplate):
            raise ProtocolError(message.reason)  # this session has not requested a template

    def _find_template(
        self, submit: Submit, work: RunRequest, connection: ExecutorChannel
    ) -> Generator[Wait, None, BoundTemplate | None]:
        """Return the bound template of a submission, or None if the submission runs nothing.

        Raises:
            _Refused: the submission cannot run.
        """
        if submit.refused:
            raise _Refused(UnsupportedOperation(submit.refused), submit.first)
        if not submit.digest:
            return None
        cached = self._templates.get(submit.digest)
        template, first = submit.template, submit.first
        if cached is not None:
            self._counts.template_cache_hits += 1
        elif template is None:
            self._counts.template_requests += 1
            connection.send(Frame(encode(TemplateRequest(submit.sequence, submit.digest))))
            yield Wait((TEMPLATE,))
            definition = self._loop.machine.template()[0]
            assert isinstance(definition, TemplateReply | UnreadableTemplate)
            if isinstance(definition, UnreadableTemplate):
                raise _Refused(ProtocolError(definition.reason), definition.first)
            template, first = definition.template, definition.first
        try:
            bound = cached if cached is not None else self._define_template(template, first, submit.digest)
            bind(bound, submit, work)
        except (TransportError, QuotaExceeded):
            raise
        except Exception as error:
            raise _Refused(error, first) from error
        return bound

    def _define_template(
        self, template: Template | None, first: InitialBindings | None, digest: bytes
    ) -> BoundTemplate:
        """Compile a new template unless another session has, and bind it for its first run."""
        self._context.threads.promote_follower()
        if template is None or digest_of(template) != digest:
            raise ProtocolError("the digest of a template differs from the digest in its submission")
        self._counts.template_cache_misses += 1
        shared_templates = self.device.templates
        compiled_template = shared_templates.get(digest)
        if compiled_template is None:
            compiled_template = shared_templates.put(digest, self._compile(template))
        bound = self._runs.bind(compiled_template, digest)
        begin(bound, *((first.slots, unpack_handles(first.inputs)) if first is not None else ((), ())))
        bound.workload = first.workload if first is not None else None
        self._templates.put(digest, bound, len(template.code))
        return bound

    def _compile(self, template: Template) -> CompiledTemplate:
        began = time.perf_counter()
        compiled_template = compile_template(template, self.device.runtime.device, self.device.own)
        self._counts.template_prepare_seconds += time.perf_counter() - began
        self._counts.templates_compiled += 1
        return compiled_template

    def _await_operands(self, bound: BoundTemplate | None, work: RunRequest) -> Iterator[Wait]:
        """Wait for reads of operands from files. If cancelled, forget those to free or write; poison those only written."""
        inputs = work.inputs if bound is not None else []
        wait = self._reads.wait({*inputs, *work.fetch, *work.describe})
        yield attrs.evolve(wait, cancelled=lambda: bool(work.halt.value & CANCEL))
        if bound is None or not work.halt.value & CANCEL:
            return
        failure = Failure(work.sequence, 0, "", "ProgramStopped", "cancelled during the read of its weights")
        consumed = set(bound.consumed(inputs))
        written_handles = {inputs[position] for position in bound.input_aliases(self.device.own).written_inputs}
        for handle in (consumed | written_handles) & self._uploads.reading:
            self._reads.forget([handle])
            if handle not in consumed:
                self.values[handle] = Poison(failure)

    def _report_reads(self, request: ReadProgressRequest, connection: ExecutorChannel) -> Iterator[Wait]:
        """Reply with the bytes of pending reads, once all reads are complete or the client's timeout has passed."""
        yield attrs.evolve(self._reads.wait(), until=time.monotonic() + clamp_timeout(request.patience))
        connection.send(Frame(encode(ReadProgressReply(self._reads.pending_bytes()))))

    def _read_weights(self, request: ReadWeights) -> None:
        self._usage.check_values()
        try:
            self._reads.read(request)
        except ProtocolError as error:
            _log.warning("refused a client's invalid request to read a weight", reason=str(error))
            self._uploads.refuse(request.handle, str(error))

    def _save_weights(self, request: SaveWeights, connection: ExecutorChannel) -> Iterator[Wait]:
        yield self._reads.wait(_readable(request.handles))
        weights, deliver = self._context.weights, self._deliver
        answer_once(connection, lambda again: save_values(request, self.values, weights, deliver, again))

    def _deliver(self, value: torch.Tensor) -> torch.Tensor:
        with self._turn:
            return self.device.runtime.deliver(value)

    def _refuse(self, work: RunRequest, refused: _Refused, digest: bytes, connection: ExecutorChannel) -> None:
        """Refuse a submission: poison its outputs and the operands that it would write, and send the failure.

        Drop the template, because the client now assumes bindings that this session does not have. The client sends the
        template again.
        """
        self._counts.submissions_refused += 1
        self._runs.drop_runs_ahead()
        self._templates.drop(digest)
        error = refused.error
        failure = Failure(work.sequence, -1, "", type(error).__name__, str(error)[: limits.FAILURE_TEXT])
        written_handles = _readable(refused.first.written) if refused.first is not None else ()
        for handle in {storage_of(handle): handle for handle in written_handles}.values():
            self.values.poison_storage(handle, 0, failure)
        for handle in work.outputs:
            self.values[handle] = Poison(failure)
        self.values.free(work.free)
        self._reads.shares.forget(work.free)
        texts = FailureTexts()
        results = tuple([texts.truncate(failure) for _ in work.fetch])
        descriptions = tuple([texts.truncate(failure) for _ in work.describe])
        connection.send(Frame(encode(Completed(work.sequence, results, descriptions, (failure,)))))

    def holdings(self) -> tuple[int, Mapping[int, int]]:
        """Return the number of values, and their bytes by address, as `MeteredSession.holdings` does."""
        return len(self.values), self.values.storage_sizes()

    def live_values(self) -> int:
        """Return the number of live values, including pending uploads and reads."""
        return len(self.values) + len(self._uploads.wanted) + len(self._reads.reading)

    def counters(self) -> Mapping[str, float]:
        """Return the counters since the session began, as `MeteredSession.counters` does."""
        sent, received = self.exchange.transfers
        transfers = {
            "peer_transfers_sent": sent,
            "peer_transfers_received": received,
            "peer_sent_bytes": self.exchange.bytes_sent,
        }
        return attrs.asdict(self._counts) | transfers

    def gauges(self) -> SessionGauges:
        """Return the present gauges, as `MeteredSession.gauges` does."""
        template_counts = len(self._templates), self._templates.instructions
        more_gauges = self.values.poison_count(), self.exchange.unacknowledged_bytes, sum(self._evicted().values())
        amounts = dict(zip(EVERY_SESSION, (*template_counts, *more_gauges), strict=True))
        if self._memory is not None:
            cache_bytes, pinned = self._memory.cache_bytes()
            amounts |= {"kv_cache_bytes": cache_bytes, "kv_cache_pinned_bytes": pinned}
        kinds = self._notes.kinds
        return SessionGauges(amounts, kinds.phase, kinds.by_kind())

    def _evicted(self) -> dict[str, int]:
        """Return the bytes of evicted values by location, such as `host` and `disk`. Thread-safe."""
        return self._memory.evicted_to() if self._memory is not None else {}

    def figures(self) -> dict[str, int]:
        """Return the figures for the client's statistics: values, memory, submissions, templates, transfers, device."""
        memory, device = self.values.nbytes(), device_figures(self.device.runtime)
        bytes_by_kind = self._notes.kinds.by_kind()
        return (
            device
            | {
                "values": len(self.values),
                "bound_values": sum(not can_move(value) for _, value in self.values.items()),
                "memory": memory,
                "memory_peak": max(self.values.peak(memory), device.get("device_peak", 0)),
                "reserved": max(memory, device.get("device_reserved", 0)),
                "submissions": self.submissions,
                "templates": len(self._templates),
                **dict(zip(("appended_bytes", "append_copied_bytes"), copied_bytes(), strict=True)),
                "runs_ahead": self._counts.runs_ahead,
                "runs_ahead_dropped": self._counts.runs_ahead_dropped,
                "runs_reused": self._runs.runs_reused,
                "peer_bytes": self.exchange.bytes_sent,
                "peer_kept": self.exchange.unacknowledged_bytes,
                **{f"idle_{location}": nbytes for location, nbytes in self._evicted().items()},
            }
            | {name: int(value) for name, value in self.device.arbiter.figures().items()}
            | (self.device.ledger.figures() if self.device.ledger else {})
            | {f"used_{kind}": bytes_by_kind.get(kind, 0) for kind in KINDS.values()}
            | (self._memory.figures() if self._memory is not None else {})
        )

    def overview(self, holdings: Holdings) -> SessionOverview:
        """Return the overview of the session, as `ServedSession.overview` does."""
        evicted = self._evicted()
        aside = evicted.get(HOST, 0), evicted.get(DISK, 0)
        shared_bytes = holdings.shared(self)
        notes, serving = self._notes.overview(), self._requests.figures()
        return attrs.evolve(notes, shared=shared_bytes, submissions=self.submissions, aside=aside, serving=serving)

    def request_times(self) -> Mapping[str, ModelTimes]:
        """Return the durations of requests by model, as `MeteredSession.request_times` does."""
        return self._requests.by_model

    def stop(self) -> None:
        """Stop the session, as `ServedSession.stop` does."""
        self._cancellation.stop_all()

    def close(self) -> None:
        """End the session, and free its values and templates."""
        self._requests.close()
        self._usage.leave(self)
        self.exchange.close()
        with self._turn:
            self._reads.clear()
            self._runs.close()
            self.values.clear()
            self.device.arbiter.free(dead=True)
            self._uploads.clear()
            self._templates.clear()
            self._loop.machine.close()
            self.device.randomness.forget(self._runs.randomness)


class _Refused(Exception):  # noqa: N818 - a signal within this file
    """A submission cannot run. `error`: the reason. `first`: the submission's bindings, if readable."""

    def __init__(self, error: Exception, first: InitialBindings | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.first = first


def _readable(packed: Handles) -> Sequence[int]:
    """Unpack handles. Return an empty sequence if they are unreadable."""
    try:
        return unpack_handles(packed)
    except ProtocolError as error:
        _log.warning("cannot decode the written handles of a refused submission", reason=str(error))
        return ()


def _synchronize(target: Any, work: RunRequest, run: RunOutcome) -> None:
    """Wait for a device runtime or an event. An error becomes a failure of the run."""
    try:
        target.synchronize()
    except RuntimeError as error:
        run.failures.append(Failure(work.sequence, -1, "synchronize", type(error).__name__, str(error)))
