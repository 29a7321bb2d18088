"""Run predicted submissions speculatively while a session waits for its client.

A run ahead stops before the first instruction that writes an existing value or draws random numbers, so it has no
visible effect. It runs in small slices, and the session polls for messages between them. If the predicted submission
arrives with the same tensors, it uses the results or continues the run. Otherwise the results are dropped. An error only
ends the run ahead: the submission's run raises it again. Nothing runs ahead on a device that evicts values.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any, Final

import torch

from djinn_core.hookspecs.transports import Frame
from djinn_core.torch_private import inference_mode
from djinn_core.wire.binding_delta import Slot
from djinn_core.wire.messages import Submit
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.templates import TemplateCache
from djinn_server.hookspecs.run_strategies import RunOffer
from djinn_server.recovery.executor_channel import ExecutorChannel
from djinn_server.running.arbiter import ServedRun
from djinn_server.running.bound_templates import BoundTemplate
from djinn_server.running.compiled_step import Environment
from djinn_server.running.expected_runs import ExpectedSubmission, SubmissionPredictor
from djinn_server.running.fair_share import Share
from djinn_server.running.growing import Growth, are_dense
from djinn_server.running.native_replay import MIN_STEPS
from djinn_server.running.run import RunOutcome, TemplateRun
from djinn_server.running.run_request import RunRequest
from djinn_server.running.values import ValueTable
from djinn_server.session_metrics import SessionCounters
from djinn_server.shared_device import SharedDevice

MAX_RESULT_AGE: Final = 1.0  # seconds after which unused results are dropped
MAX_RUNS: Final = 8  # runs whose submissions have not arrived
MAX_RUN_SECONDS: Final = 1.0  # duration of a program that may run ahead
MAX_COMPILED_SECONDS: Final = 0.05  # the same for compiled code, which does not poll for messages
_TENSORS: Final = frozenset({torch.Tensor})
_NO_INPUTS: Final[Sequence[int]] = ()
_POLL_SECONDS: Final = 0.001  # length of a slice


class RunAhead:
    """A speculative run of a template whose submission has not arrived.

    Attributes:
        bound: the template.
        expected: the prediction.
        inputs, slots: predicted inputs and slots.
        env: environment of the run.
        growth: steps that append in place; None: the run uses the template's own steps.
        step: number of the next instruction.
        stop: number of the first instruction that may not run ahead.
        offer: offer of a run strategy that runs the template; None: op by op.
        replacement: ops that the offer replaces; None if it replaces no ops.
        seconds: duration so far.
        nbytes: bytes of the outputs of a finished run.
        native_ops: number of ops that the library ran.
    """

    __slots__ = (
        "_native",
        "_steps",
        "bound",
        "env",
        "expected",
        "growth",
        "inputs",
        "native_ops",
        "nbytes",
        "offer",
        "replacement",
        "seconds",
        "slots",
        "step",
        "stop",
    )

    def __init__(
        self,
        bound: BoundTemplate,
        expected: ExpectedSubmission,
        slots: list[Slot],
        inputs: list[torch.Tensor],
        stop: int,
        growth: Growth | None = None,
    ) -> None:
        template = bound.template
        self.growth = growth
        self._steps = template.steps if growth is None else growth.steps
        self.bound, self.expected, self.slots, self.inputs = bound, expected, slots, inputs
        self.offer = _offer(bound)
        self.replacement = replaced = None if self.offer is None else self.offer.replacement()
        self.stop = stop if replaced is None or replaced.stop <= stop else min(stop, replaced.start)
        self.env: Environment = [*template.constants, *slots, *inputs, *([None] * template.computed)]
        self._native = template.native() if growth is None else template.native_growth(growth)
        self.native_ops = 0
        self.step = self.nbytes = 0
        self.seconds = 0.0

    @property
    def is_finished(self) -> bool:
        """True if all instructions have run."""
        return self.step == len(self.bound.template.steps)

    def advance(self, until: float) -> None:
        """Run at least one instruction, and stop at time `until` (`time.perf_counter`)."""
        step, stop, replaced = self.step, self.stop, self.replacement
        with inference_mode(True):
            while step < stop:
                if replaced is not None and step == replaced.start and replaced.apply(self.env):
                    step = replaced.stop
                elif replaced is not None and step < replaced.start:
                    step = self._advance(step, min(replaced.start, stop), until)
                else:
                    step = self._advance(step, stop, until)
                if time.perf_counter() > until:
                    break
        self.step = step

    def _advance(self, step: int, stop: int, until: float) -> int:
        """Run one step, or all following steps that the library can run. Return the number of the next step."""
        native = self._native
        if native is not None and (end := min(native.ends[step], stop)) - step >= MIN_STEPS:
            seconds = max(until - time.perf_counter(), 1e-9)
            after, error = native.run(step, end, self.env, seconds=seconds)
            if error is not None:
                raise error
            self.native_ops += after - step
            if after > step:
                return after
            self._native = None
        self._steps[step].run(self.env)
        return step + 1

    def output(self, number: int) -> Any:
        """Return an output of a finished run."""
        return self.env[self.bound.template.outputs[number]]

    def output_bytes(self) -> int:
        """Return the bytes of the tensors that a finished run outputs."""
        values = [self.env[place] for place in self.bound.template.outputs]
        return sum([value.nbytes for value in values if type(value) is torch.Tensor])

    def fits(self, work: RunRequest, slots: Sequence[Slot], values: ValueTable) -> bool:
        """Return True if a submission of the template has the slots and inputs of this run, and may use its results."""
        if work.claims or work.halt.value or work.stop_at is not None or work.op_times is not None:
            return False
        if not all(map(is_, map(values.table.get, work.inputs), self.inputs)):
            return False
        changed = [(a, b) for a, b in zip(slots, self.slots, strict=True) if a is not b]
        return all(type(a) is type(b) and a == b and a != 0 for a, b in changed)  # 0.0 == -0.0, but they differ

    def finish(self, work: RunRequest, values: ValueTable, limit: int) -> RunOutcome:
        """Run the remaining instructions for the submission that arrived, and return the outcome.

        If the outputs exceed `limit` bytes, the template never runs ahead again.
        """
        began = time.perf_counter()
        choice = self.bound.choice
        run = TemplateRun(self.bound.template, work, self.slots, values, growth=self.growth, env=self.env)
        run.step, run.outcome.native_ops = self.step, self.native_ops
        offer, replaced = self.offer, self.replacement
        if choice is not None and offer is not None and replaced is not None and self.step <= replaced.start:
            with inference_mode(True):
                for _ in offer.run(ServedRun(choice.facts, run, self.slots, lambda: iter(()))):
                    pass
        if not self.is_finished:
            run.advance()
            if self.output_bytes() > limit:
                self.bound.runs_ahead = 0
        if choice is not None:
            choice.add_seconds(self.seconds + time.perf_counter() - began)
        return run.finish()


def _offer(bound: BoundTemplate) -> RunOffer | None:
    """Return the offer of a run strategy that runs a template next, or None if it runs op by op."""
    candidate = bound.choice.next(exact=False) if bound.choice is not None else None
    return candidate.offer if candidate is not None else None


class RunsAhead:
    """The speculative runs of one session. Only the session's thread uses them.

    Attributes:
        pending: runs that no submission has used yet, the next one first. Only the last run may be unfinished.
        ready: True if the session should call `receive` for the next message.
    """

    def __init__(
        self,
        device: SharedDevice,
        share: Share,
        values: ValueTable,
        templates: TemplateCache[BoundTemplate],
        counts: SessionCounters,
        limit: int,
    ) -> None:
        """Create the state of one session.

        Args:
            device: the executor's device.
            share: the session's share of the device.
            values: the session's values.
            templates: the session's templates by digest.
            counts: counters of the session.
            limit: maximum bytes of outputs that no submission has used.
        """
        self._device, self._share, self._values, self._templates = device, share, values, templates
        self._counts, self._limit = counts, limit
        self._predictor = SubmissionPredictor()
        self._bytes = 0
        self.pending: deque[RunAhead] = deque()
        self.ready = False

    def add(self, submit: Submit, bound: BoundTemplate | None, work: RunRequest, seconds: float) -> None:
        """Add a submission that ran for `seconds` and was answered, and predict again.

        `bound`: its template; None if it has none.
        """
        inputs = work.inputs if bound is not None else _NO_INPUTS
        awaited = True if work.fetch or work.describe else work.synchronize
        self._predictor.add(submit, inputs, work.outputs, seconds, awaited=awaited)
        self.ready = self._predictor.repeats

    def receive(self, connection: ExecutorChannel, settings: NumericSettings | None) -> Frame | None:
        """Run predicted submissions until the next frame arrives, and return the frame.

        Return None if no run is pending, or if a pending result waited longer than `MAX_RESULT_AGE`. `settings`: the
        session's numeric settings.
        """
        while self.ready and self._current_run() is not None:
            try:
                return connection.receive(0.0)
            except TimeoutError:
                if not self.advance(settings):
                    break
        if not self.pending:
            return None
        try:
            return connection.receive(MAX_RESULT_AGE)
        except TimeoutError:
            self.reject_prediction()
            return None

    def advance(self, settings: NumericSettings | None) -> bool:
        """Run a slice of a predicted submission, under the session's numeric settings.

        Return False if the device is busy or nothing can run ahead now.
        """
        if not self._device.turns.begin_if_free(self._share):
            return False
        try:
            run = self._current_run()
            if run is None:
                return False
            self._device.numeric_settings.compute_under(settings)
            self._advance(run, self._share.began_at)
        finally:
            self._device.turns.leave(self._share, returns=False)
        return self.ready

    def _advance(self, run: RunAhead, began: float) -> None:
        try:
            run.advance(began + _POLL_SECONDS)
            if run.is_finished:
                run.nbytes = run.output_bytes()
                self._bytes += run.nbytes
                if run.nbytes > self._limit:
                    run.bound.runs_ahead = 0
        except Exception:  # the submission's own run raises it again
            self.reject_prediction()
        run.seconds += time.perf_counter() - began

    def _current_run(self) -> RunAhead | None:
        """Return the run to continue or a new run, or None if no submission can run ahead now."""
        pending = self.pending
        if not pending or pending[-1].is_finished:
            return self._start_next()
        return pending[-1] if pending[-1].step < pending[-1].stop else None

    def _start_next(self) -> RunAhead | None:
        """Start a run of the next predicted submission. Return None if it may not run ahead or nothing is predicted."""
        pending = self.pending
        if pending and (pending[-1].expected.awaited or len(pending) == MAX_RUNS or self._bytes > self._limit):
            return None
        expected = self._predictor.predict(len(pending) + 1)
        if expected is None or expected.seconds > MAX_RUN_SECONDS or self._values.is_indexed:
            return None
        bound = self._templates.get(expected.digest)
        if bound is None or not self._may_run(bound):
            return None
        if (
            expected.seconds > MAX_COMPILED_SECONDS
            and (offer := _offer(bound)) is not None
            and offer.replacement() is not None
        ):
            return None
        try:
            run = self._start_run(bound, expected)
        except IndexError:  # another template has run than predicted, and has fewer outputs
            return None
        if run is not None:
            pending.append(run)
        return run

    def _may_run(self, bound: BoundTemplate) -> int:
        """Return the number of leading PyTorch ops that may run ahead: they neither write inputs nor reallocate.

        Return 0 if the template's run strategy must see each submission.
        """
        if bound.runs_ahead is None:
            steps = bound.template.steps
            unsafe = (at for at, step in enumerate(steps) if step.moves or not step.op.startswith("aten::"))
            steps_before_write = bound.input_aliases(self._device.own).steps_before_write
            bound.runs_ahead = min(next(unsafe, len(steps)), steps_before_write)
        offer = _offer(bound)
        runs = offer is None or offer.replacement() is not None
        return bound.runs_ahead if runs else 0

    def _start_run(self, bound: BoundTemplate, expected: ExpectedSubmission) -> RunAhead | None:
        pending, get = self.pending, self._values.table.get
        before = next((run for run in reversed(pending) if run.bound is bound), None)
        slots: Sequence[Slot] = bound.slots if before is None else before.slots
        inputs: list[Any] = [*map(get, bound.inputs)] if before is None else [*before.inputs]
        growth = bound.template.growth() if bound.choice is None or not bound.choice.candidates else None
        for position, source in zip(expected.relation.positions, expected.relation.sources, strict=True):
            assert source is not None
            distance, number = source
            if distance <= len(pending):
                inputs[position] = pending[-distance].output(number)
            else:
                inputs[position] = get(self._predictor.output((distance - len(pending), number)))
        slots = expected.slots(slots)
        assert bound.runs_ahead is not None
        draws = bound.draws.first_draw(slots)
        stop = bound.runs_ahead if draws is None else min(draws, bound.runs_ahead)
        if not stop or not _TENSORS.issuperset(map(type, inputs)):
            return None
        any_growing = self._values.growing or any(run.growth is not None for run in pending)
        if any_growing and not are_dense(inputs, growth):
            return None  # the submission's own run copies such inputs to dense memory
        return RunAhead(bound, expected, slots, inputs, stop, growth)

    def take(self, bound: BoundTemplate, work: RunRequest) -> RunAhead | None:
        """Remove and return the run ahead of a submission that arrived. `pending` must not be empty.

        If the next run does not fit the submission, drop all runs and return None.
        """
        run = self.pending[0]
        if run.bound is not bound or not run.fits(work, bound.slots, self._values):
            self.reject_prediction(same_template=run.bound is bound)
            return None
        del self.pending[0]
        self._bytes -= run.nbytes
        self._counts.runs_ahead += 1
        self._predictor.confirm(run.expected)
        return run

    def reject_prediction(self, *, same_template: bool = False) -> None:
        """Drop all runs, because a prediction was wrong. `same_template`: True if only inputs or slots differed."""
        if self.pending:
            self._predictor.reject(self.pending[0].expected, same_template=same_template)
            self.drop()

    def drop(self) -> None:
        """Drop all runs, and undo their appends to growing tensors."""
        self.ready = False
        self._counts.runs_ahead_dropped += len(self.pending)
        while self.pending:
            run = self.pending.pop()  # the latest first, because appends are undone in reverse order
            if run.growth is not None:
                run.growth.undo(run.inputs, run.env)
        self._bytes = 0
