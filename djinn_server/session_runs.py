"""Run a session's submissions: op by op, by a run strategy, ahead of time, or within a memory limit."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial

from djinn_core.errors import ProtocolError, QuotaExceeded, TransportError
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.message_base import Failure
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.templates import TemplateCache
from djinn_server.context import ExecutorContext
from djinn_server.hookspecs.run_strategies import JointRun
from djinn_server.memory.session_memory import SessionMemory
from djinn_server.running.arbiter import Candidate, ServedRun, TemplateChoice
from djinn_server.running.bound_templates import BoundTemplate
from djinn_server.running.cached_results import CacheableRun
from djinn_server.running.cancellation import CancellationState
from djinn_server.running.device_turn import DeviceTurn
from djinn_server.running.fair_share import Share, Steps
from djinn_server.running.growing import Growth
from djinn_server.running.joint_runs import JoinableSubmission
from djinn_server.running.lanes import Access, access_of
from djinn_server.running.random_state import SessionRandomness
from djinn_server.running.run import RunOutcome, StepGuard, TemplateRun, refuse_run, run_template
from djinn_server.running.run_request import RunRequest
from djinn_server.running.runs_ahead import RunsAhead
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import ValueTable
from djinn_server.session_metrics import SessionCounters
from djinn_server.value_kinds import ValueKinds
from djinn_server.weights.shared_weights import SessionShares

_log = get_logger("djinn.server")


def run_to_end(run: Generator[None, None, RunOutcome]) -> RunOutcome:
    """Advance a generator to its end without yielding the device, and return its outcome."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class SessionRuns:
    """Run the submissions of one session.

    Attributes:
        memory: the session's memory on a device that evicts values; else None.
        limited: True if the device has a memory limit, not only eviction on demand.
        ahead: speculative runs of predicted submissions; None if the executor does none.
        runs_reused: number of runs that reused results of earlier runs.
        alone: True on a CPU, if time is not simulated and no strategy joins sessions.
        randomness: the session's random state.
        numeric_settings: the session's numeric settings; None: those of the process.
    """

    def __init__(
        self,
        context: ExecutorContext,
        turn: Share,
        values: ValueTable,
        kinds: ValueKinds,
        shares: SessionShares,
        templates: TemplateCache[BoundTemplate],
        cancellation: CancellationState,
        counts: SessionCounters,
    ) -> None:
        self._device = device = context.device
        self._ahead_bytes = context.ahead_bytes
        self._turn, self._values, self._shares = turn, values, shares
        self._cancellation = cancellation
        self.randomness = SessionRandomness(device.runtime.device)
        self.numeric_settings: NumericSettings | None = None
        self.runs_reused = 0
        self.memory = SessionMemory(device.ledger, values, kinds) if device.ledger is not None else None
        self.limited = self.memory is not None and self.memory.limited
        self.alone = device.runtime.device.type == "cpu" and not device.arbiter.joins_sessions and not device.timekeeper
        self._grows = self.alone and device.ledger is None  # verified only for CPU kernels without eviction
        self.ahead = self._runs_ahead(templates, counts)

    def _runs_ahead(self, templates: TemplateCache[BoundTemplate], counts: SessionCounters) -> RunsAhead | None:
        """Return the object that runs predicted submissions, or None if this executor runs nothing ahead.

        Nothing runs ahead with a limit of 0 bytes, joint runs, simulated time, eviction, or an (untested) accelerator.
        """
        limit = self._ahead_bytes
        if not limit or not self._grows:
            return None
        return RunsAhead(self._device, self._turn, self._values, templates, counts, limit)

    def bind(self, compiled: CompiledTemplate, digest: bytes) -> BoundTemplate:
        """Return the session's binding of a compiled template, which has no slots and inputs yet."""
        choice = self._device.arbiter.choice(digest, compiled)
        bound = BoundTemplate(compiled, [], [], digest=digest)
        if choice is not None:
            bound.joint = choice.joint
            bound.choice = choice if choice.candidates or choice.caches else None
        return bound

    def drop_runs_ahead(self) -> None:
        """Discard the runs ahead, because the session handles an unpredicted message."""
        if self.ahead is not None:
            self.ahead.reject_prediction()

    def joinable(self, bound: BoundTemplate, joint: Candidate, work: RunRequest, *, timed: bool) -> JointRun | None:
        """Return the submission as a run that other sessions may join, or None if it must run alone.

        `joint`: the offer that runs the sessions together. `timed`: True if each op is timed.
        """
        settings = self.numeric_settings
        if not (self._turn.group or self._device.turns.busy) or settings is None or settings.exact:
            return None
        if (
            joint.failed
            or work.stop_at is not None
            or timed
            or (bound.choice is not None and bound.choice.is_replaced())
        ):
            return None
        session = self._values, self._shares, self.randomness, settings, self._turn
        submission = JoinableSubmission(work, bound.slots, bound.input_aliases(self._device.own), *session)
        return self._device.arbiter.call_strategy(joint.strategy, partial(joint.offer.join, submission))

    def after_turn(self, bound: BoundTemplate | None, pending: JointRun, seconds: float) -> float | None:
        """Pass a turn's device `seconds` to `pending`. Return the start of its joint run, or None if it ran alone."""
        joint = None if bound is None else bound.joint
        return (
            None
            if joint is None
            else self._device.arbiter.call_strategy(joint.strategy, partial(pending.ended, seconds))
        )

    def run(
        self, bound: BoundTemplate | None, work: RunRequest, pending: JointRun | None = None
    ) -> Generator[None, None, RunOutcome]:
        """Run a submission, or its joinable run `pending`. An internal error fails only this submission."""
        if bound is None:
            self.drop_runs_ahead()
            return RunOutcome()
        watch = self._device.watch
        issued_work = watch.begin(self._cancellation, work, bound.template) if watch is not None else None
        try:
            return (yield from self._run(bound, work, pending))
        except (TransportError, ProtocolError, QuotaExceeded):
            raise
        except Exception as error:
            return self._fail(error, bound, work)
        finally:
            self._device.randomness.give_back()
            if watch is not None and issued_work is not None:
                watch.issued(issued_work)  # before the session waits for the device, so that the watch detects a hang

    def _fail(self, error: Exception, bound: BoundTemplate, work: RunRequest) -> RunOutcome:
        """Return the outcome of a submission that failed by an internal error of the executor."""
        _log.error("a submission failed by an internal error of the executor", submission=work.sequence, exc_info=error)
        text = f"the executor failed: {error}"[: limits.FAILURE_TEXT]
        failure = Failure(work.sequence, -1, "", type(error).__name__, text)
        return refuse_run(bound.template, work, bound.slots, self._values, failure)

    def access(self, bound: BoundTemplate | None, work: RunRequest) -> Access | None:
        """Return the storages that a submission uses, or None if it should not run concurrently with other submissions."""
        ahead = self.ahead is not None and self.ahead.pending
        if not self.alone or self.memory is not None or ahead:
            return None
        if bound is None:
            return access_of(None, work, (), ())
        if not self._device.lanes.pay_for(bound):
            return None
        choice = self._choice(bound)
        if choice is not None and (choice.candidates or choice.caches):
            return None  # the arbiter times its runs one by one
        if bound.template.moves or bound.draws.first_draw(bound.slots) is not None:
            return None
        growth = self._growth(bound, choice)
        growing_positions = [] if growth is None else [position for position, _ in growth.appends]
        return access_of(bound, work, self._device.own, growing_positions)

    def begin_in_lane(self, turn: DeviceTurn) -> TemplateRun | None:
        """Return the run of a submission, as `LaneRuns.begin_in_lane` does."""
        bound, work = turn.bound, turn.work
        assert bound is not None
        work.on_halt = self._cancellation.handle_halt
        self._device.numeric_settings.compute_under(self.numeric_settings)
        with self._values.lock:
            try:
                self._before_run(bound, work)
                growth = self._growth(bound, self._choice(bound))
                return TemplateRun(bound.template, work, turn.slots, self._values, growth=growth)
            except Exception as error:
                turn.outcome = self._fail(error, bound, work)
                return None

    def finish_in_lane(self, turn: DeviceTurn, run: TemplateRun, error: Exception | None) -> None:
        """Store the results of a run, as `LaneRuns.finish_in_lane` does."""
        assert turn.bound is not None
        with self._values.lock:
            try:
                if error is not None:
                    raise error
                turn.outcome = run.finish()
            except Exception as failure:
                turn.outcome = self._fail(failure, turn.bound, turn.work)

    def _run(
        self, bound: BoundTemplate, work: RunRequest, pending: JointRun | None
    ) -> Generator[None, None, RunOutcome]:
        device, memory, values = self._device, self.memory, self._values
        if pending is not None and (joint_outcome := (yield from pending.run())) is not None:
            return joint_outcome  # type: ignore[no-any-return]
        if self.numeric_settings is not device.numeric_settings.current:
            device.numeric_settings.compute_under(self.numeric_settings)
        if bound.template.random:
            device.randomness.hand_to(self.randomness)
        self._before_run(bound, work)
        if device.timekeeper is not None and memory is None:
            with device.timekeeper.running():
                return run_template(bound.template, work, bound.slots, values)
        if memory is not None and self.limited:
            return memory.run(
                bound.digest, bound.template, work, bound.slots, lambda: run_to_end(self._by_arbiter(bound, work, None))
            )
        if self.ahead is not None and self.ahead.pending and (ahead := self.ahead.take(bound, work)) is not None:
            return ahead.finish(work, values, self._ahead_bytes)
        work.on_halt = self._cancellation.handle_halt
        if memory is None:
            return (yield from self._by_arbiter(bound, work, None))
        with memory.on_demand(bound.digest, bound.template, work) as guard:
            return (yield from self._by_arbiter(bound, work, guard))

    def _by_arbiter(
        self, bound: BoundTemplate, work: RunRequest, guard: StepGuard | None
    ) -> Generator[None, None, RunOutcome]:
        """Run a submission as the arbiter decides; but op by op if it has a memory guard, or if its ops are timed."""
        choice = self._choice(bound)
        growth = self._growth(bound, choice)
        keep_growing = choice is not None and not choice.caches and not self._exact
        run = TemplateRun(
            bound.template, work, bound.slots, self._values, guard=guard, growth=growth, keep_growing=keep_growing
        )
        if choice is None or guard is not None or work.op_times is not None:
            while not run.advance():
                yield from self.pause(bound.template.random, work)
        else:
            names, cacheable = self._shares.names, None
            if choice.caches and choice.facts.cacheable_ops is not None and names is not None:
                ops, table = choice.facts.cacheable_ops, self._device.cached_results
                cacheable = CacheableRun(ops, run, names, table, self.numeric_settings)
            pause = partial(self.pause, bound.template.random, work)
            served_run = ServedRun(choice.facts, run, bound.slots, pause, cacheable)
            yield from self._device.arbiter.run(choice, served_run, exact=self._exact)
            if cacheable is not None:
                return self._finish_cacheable(run, work, cacheable)
        return run.finish()

    def _finish_cacheable(self, run: TemplateRun, work: RunRequest, cacheable: CacheableRun) -> RunOutcome:
        """Store the results of a run. Mark results that the cache shares, so that they are copied before a write."""
        outcome = run.finish()
        self.runs_reused += cacheable.reused
        for handle in cacheable.shared_outputs(work.outputs):
            self._shares.add(handle, None)
        return outcome

    def _before_run(self, bound: BoundTemplate, work: RunRequest) -> None:
        """Copy the shared weights that a run writes."""
        if self._shares.storages or self._shares.names:
            self._shares.before_run(bound.input_aliases(self._device.own), work.inputs, work.outputs)

    def _choice(self, bound: BoundTemplate) -> TemplateChoice | None:
        """Return the arbiter's choice for a template, or None if no strategy may run it for this session."""
        choice = bound.choice
        return None if choice is None or (self._exact and not choice.has_exact) else choice

    def _growth(self, bound: BoundTemplate, choice: TemplateChoice | None) -> Growth | None:
        """Return the steps of a template that append in place, or None if this session must not use them."""
        return bound.template.growth() if self._grows and (choice is None or not choice.candidates) else None

    @property
    def _exact(self) -> bool:
        return self.numeric_settings is None or self.numeric_settings.exact

    def pause(self, random: bool, *works: RunRequest) -> Steps:
        """Yield the device in the middle of the runs of `works`. `random`: True if the runs draw random numbers."""
        began = time.perf_counter()
        self._device.randomness.give_back()
        yield
        for work in works:
            work.paused_seconds += time.perf_counter() - began
        self._device.numeric_settings.compute_under(self.numeric_settings)
        if random:
            self._device.randomness.hand_to(self.randomness)

    def close(self) -> None:
        """Free the session's memory. Called at the end of the session, while it has the device."""
        if self.ahead is not None:
            self.ahead.drop()
        if self.memory is not None:
            self.memory.close()
