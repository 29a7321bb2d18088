"""One run of a compiled template over a session's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import torch

from djinn_core.errors import DjinnError
from djinn_core.ir.values import meta_of
from djinn_core.torch_private import inference_mode
from djinn_core.wire import limits
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Claim, LayoutMismatch
from djinn_server.memory.room import is_out_of_memory
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.growing import Growth
from djinn_server.running.native_replay import MIN_STEPS, NativeReplay
from djinn_server.running.poisoning import NO_HANDLE, MemorySharing
from djinn_server.running.run_request import HaltFlag, Progress, RunRequest
from djinn_server.running.template_compiler import CompiledTemplate, dtype_called
from djinn_server.running.timings import OpTimes
from djinn_server.running.uninitialized_memory import copy_with_strides, zero_fill
from djinn_server.running.values import CopyCounter, Poison, ValueTable, memory_of, no_such_value

# Ops that overwrite all elements of their first operand.
_OVERWRITES = frozenset({
    "aten::zero_",
    "aten::fill_.Scalar",
    "aten::fill_.Tensor",
    "aten::copy_",
    "aten::_foreach_zero_",
    "aten::_foreach_copy_",
})  # fmt: skip


class RunOutcome(msgspec.Struct):
    """Outcome of a submission: its failures, and the op at which it was cancelled.

    Attributes:
        failures: failures of ops, except ops that failed because an operand was poison.
        layout_mismatches: results whose layout the client predicted wrongly.
        halt, progress: as in `RunRequest`.
        stopped_at: number of the first op that did not run because the submission was cancelled, or None.
        sharing: index of values by memory; None before the first failure.
        native_ops: number of ops that the library ran.
        may_round_differently: True if results may be rounded differently than by the ops.
    """

    failures: list[Failure] = msgspec.field(default_factory=list)
    layout_mismatches: list[LayoutMismatch] = msgspec.field(default_factory=list)
    halt: HaltFlag = msgspec.field(default_factory=HaltFlag)
    progress: Progress | None = None
    stopped_at: int | None = None
    sharing: MemorySharing | None = None
    native_ops: int = 0
    may_round_differently: bool = False

    def reported_failures(self) -> tuple[Failure, ...]:
        """Return the first failures with truncated messages, for a client that does not fetch the affected values yet."""
        return tuple([
            msgspec.structs.replace(failure, message=failure.message[:_MESSAGE_CHARACTERS])
            for failure in self.failures[:_MAX_REPORTED]
        ])  # fmt: skip


_MAX_REPORTED: Final = 4  # reported failures of a submission
_MESSAGE_CHARACTERS: Final = 400  # characters of a reported failure's message
_NO_CLAIMS: Final[Mapping[int, list[Claim]]] = {}
Advance = Callable[[Sequence[CompiledStep], int, int, Environment, Mapping[int, list[Claim]], RunOutcome], int]


class StepGuard(Protocol):
    """Hooks before and after each step of a run. `index` is the step's number."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Lock that is held from `before` to `after`."""

    def before(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Prepare a step. An exception counts as the step's error."""

    def after(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Inspect the results of a step. `env` lacks the values that the step released."""

    def relieve(self, index: int, step: CompiledStep, env: Environment) -> bool:
        """Free device memory after a step ran out of memory. Return True if the step may be retried."""


class TemplateRun:
    """Run a template over a session's values. `advance(stop)` runs the instructions before `stop`.

    If an op raises, its results, the operands that it writes and all dependent values become poison. Other ops run.
    After a cancellation no op runs, and the results and written operands of the remaining ops become poison.

    Attributes:
        env: the environment: all values of the run, by place.
        step: number of the next instruction.
        outcome: outcome so far.
        claims: layouts that the client predicted, by number of the instruction.
        grown: counters of copies by place, for results with spare capacity that a run strategy made.
        template, work: the compiled template, and the submission.
    """

    __slots__ = (
        "_advance",
        "_count",
        "_growing",
        "_growth",
        "_guard",
        "_steps",
        "_values",
        "claims",
        "env",
        "grown",
        "outcome",
        "step",
        "template",
        "work",
    )

    def __init__(
        self,
        template: CompiledTemplate,
        work: RunRequest,
        slots: Sequence[Any],
        values: ValueTable,
        guard: StepGuard | None = None,
        *,
        growth: Growth | None = None,
        env: Environment | None = None,
        keep_growing: bool = False,
    ) -> None:
        """Prepare a run.

        Args:
            template: the compiled template.
            work: the submission.
            slots: numbers that the submission passes to the template.
            values: the session's values.
            guard: hooks around each step; None: no hooks.
            growth: steps that append in place; None: run the template's own steps.
            env: values of a run ahead that this run continues; None: start with the session's values.
            keep_growing: True if a run strategy may read inputs with spare capacity.
        """
        self.template, self.work, self._values, self._guard = template, work, values, guard
        self.outcome = run = RunOutcome(halt=work.halt, progress=work.progress)
        is_observed = bool(work.claims) or work.op_times is not None or guard is not None
        self._growth = growth = None if is_observed else growth
        self._steps = template.steps if growth is None else growth.steps
        first = len(template.constants) + template.slots
        keep_growing = keep_growing and growth is None and not is_observed and bool(values.growing)
        inputs = enumerate(work.inputs, first) if keep_growing else ()
        self._growing = {place: handle for place, handle in inputs if handle in values.growing}
        self.grown: Mapping[int, CopyCounter] = {}
        dense: Sequence[int] | None = None if growth is None else growth.dense
        if self._growing:
            dense = [at for at in range(template.inputs) if first + at not in self._growing]
        self.env = env = environment_of(template, work, slots, values, dense) if env is None else env
        if template.consumed:
            values.free([work.inputs[place - first] for place in template.consumed])
        self.claims = _by_instruction(work.claims) if work.claims else _NO_CLAIMS
        self.step = 0
        self._count = template.count if work.stop_at is None else min(work.stop_at, template.count)
        if template.moves and values.is_indexed:
            run.sharing = MemorySharing(template, work, env, values)
            run.sharing.index_until(0)
        self._advance: Advance = _advance if guard is None else partial(_advance_guarded, guard)
        if work.op_times is not None and guard is None:
            self._advance = partial(_advance_timed, work.op_times)
        elif guard is None and not self.claims:
            native = template.native() if growth is None else template.native_growth(growth)
            if native is not None:
                self._advance = partial(_advance_natively, native)

    def advance(self, stop: int | None = None) -> bool:
        """Run the instructions before `stop`, or all if `stop` is None. Return False if the run must yield the device."""
        steps, env, run = self._steps, self.env, self.outcome
        count = self._count if stop is None else min(stop, self._count)
        step, short = self.step, self.work.earlier_shortages
        self.densify(place for later_step in steps[step:count] for place in later_step.reads)
        with inference_mode(True):
            while step < count:
                if step in short:
                    with self._values.lock:
                        step = self._poison_step(FailedStep(step, torch.OutOfMemoryError(short[step])))
                    continue
                try:
                    until = min((op for op in short if op > step), default=count) if short else count
                    step = self._advance(steps, step, min(until, count), env, self.claims, run)
                except CancelledStep as halted:
                    step = halted.step
                    if run.progress is not None:
                        run.progress.paused = True
                    if self.work.on_halt is not None and self.work.on_halt(self.work):
                        self.step = step
                        return False
                    run.stopped_at = self._count = step
                    break
                except FailedStep as stopped:
                    step = self._handle_failed_step(stopped)
                    if self._guard is None and self.work.op_times is None:
                        self._advance = _advance  # the library does not detect poison
        self.step = step
        return True

    def densify(self, places: Iterable[int]) -> None:
        """Copy the growing inputs among `places` to dense memory."""
        for place in self._growing.keys() & set(places) if self._growing else ():
            handle, value = self._growing.pop(place), self.env[place]
            if handle in self._values:
                self.env[place] = self._values[handle]
            elif isinstance(value, torch.Tensor):  # the run has consumed the input
                with inference_mode(True):
                    self.env[place] = value.clone(memory_format=torch.contiguous_format)

    def _handle_failed_step(self, stop: FailedStep) -> int:
        """Prepare a retry of a failed instruction, or poison its values. Return the number of the next instruction."""
        with self._values.lock:
            return self._handle_failure(stop)

    def _handle_failure(self, stop: FailedStep) -> int:
        template, env, run, values = self.template, self.env, self.outcome, self._values
        step = stop.step
        if is_out_of_memory(stop.error) and self._relieve(step):
            return step
        if self._guard is not None:  # values that the guard has restored have new addresses
            values.forget_addresses()
        if run.sharing is None or self._guard is not None:
            run.sharing = MemorySharing(template, self.work, env, values)
        failed = template.steps[step]
        if _make_resizable(failed, stop, env, values, run.sharing) or _restore_overwritten(
            step, failed, env, values, run.sharing
        ):
            return step
        return self._poison_step(stop)

    def _poison_step(self, stop: FailedStep) -> int:
        """Poison the values of a failed instruction. Return the number of the next instruction."""
        run = self.outcome
        if run.sharing is None:
            run.sharing = MemorySharing(self.template, self.work, self.env, self._values)
        _poison(self.template, stop, self.work, self.env, run.sharing, run)
        return stop.step + 1

    def _relieve(self, step: int) -> bool:
        """Free device memory after a step ran out of memory, and add a guard. Return True if the step may be retried."""
        if self._guard is None:
            if self.work.guard is None:
                return False
            self._guard = guard = self.work.guard(self.template)
            self._advance = partial(_advance_guarded, guard)
        return self._guard.relieve(step, self.template.steps[step], self.env)

    @property
    def is_replaceable(self) -> bool:
        """True if a strategy may replace instructions: the executor need not run each one, and no layout is predicted."""
        return self.is_unobserved and not self.claims

    @property
    def is_unobserved(self) -> bool:
        """True if no guard, timer or replay needs each single instruction. Predicted layouts do not count."""
        work = self.work
        is_watched = self._guard is not None or work.op_times is not None
        return not (is_watched or work.earlier_shortages or work.stop_at is not None)

    @property
    def extends_growing(self) -> bool:
        """True if the run appends to an input that already has spare capacity."""
        if self._growth is None:
            return False
        first = len(self.template.constants) + self.template.slots
        inputs = [self.env[first + position] for position, _ in self._growth.appends]
        return any(torch.ops.djinn_replay.are_growing([value for value in inputs if isinstance(value, torch.Tensor)]))

    def dense_value(self, place: int) -> Any:
        """Return the value at a place after the run. A growing tensor is returned as a dense copy."""
        value, growth = self.env[place], self._growth
        grows = growth is not None and any(self.template.outputs[number] == place for number in growth.outputs)
        if place in self.grown or (
            grows and isinstance(value, torch.Tensor) and torch.ops.djinn_replay.are_growing([value])[0]
        ):
            return value.clone(memory_format=torch.contiguous_format)
        return value

    def fail(self, stop: int, error: Exception) -> None:
        """Skip the instructions before `stop`, and poison their results and written operands with `error`."""
        self.outcome.sharing = MemorySharing(self.template, self.work, self.env, self._values)
        for step in range(self.step, stop):
            self._poison_step(FailedStep(step, error))
        self.step = stop

    def skip_steps(self, stop: int, released: Sequence[int], results: Mapping[int, Any]) -> None:
        """Skip the instructions before `stop`, because their results are known.

        `released`: places to clear. `results`: results by place.
        """
        env = self.env
        for place in released:
            env[place] = None
        for place, value in results.items():
            env[place] = value
        self.step = stop

    def finish(self) -> RunOutcome:
        """Store the results in the session's values, and return the outcome."""
        self.densify(self.template.outputs)  # an input may be a result
        template, work, run, values = self.template, self.work, self.outcome, self._values
        if run.stopped_at is None:
            run.stopped_at = work.stop_at
        if run.stopped_at is not None:
            run.failures += MemorySharing(template, work, self.env, values).poison_remaining(run.stopped_at)
        if run.sharing is not None and self._guard is None:
            run.sharing.index_until(self.step)
        elif template.moves:
            values.forget_addresses()
        for handle, place in zip(work.outputs, template.outputs, strict=True):
            values[handle] = self.env[place]
        if self._growth is not None:
            growing = self._growth.growing_outputs(work.outputs, template.outputs, self.env)
            values.growing.update(dict.fromkeys(growing, self._growth))
        tensor_places = [place for place in self.grown if isinstance(self.env[place], torch.Tensor)]
        places = zip(work.outputs, template.outputs, strict=True) if tensor_places else ()
        values.growing.update({handle: self.grown[place] for handle, place in places if place in tensor_places})
        return run


def run_template(template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], values: ValueTable) -> RunOutcome:
    """Run a whole template, store its results in `values`, and return the outcome."""
    run = TemplateRun(template, work, slots, values)
    run.advance()
    return run.finish()


def refuse_run(
    template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], values: ValueTable, failure: Failure
) -> RunOutcome:
    """Poison the results and written operands of a submission that is refused, and return the outcome.

    `failure`: why it is refused.
    """
    env = environment_of(template, work, slots, values)
    MemorySharing(template, work, env, values).poison_from(0, failure)
    for handle, place in zip(work.outputs, template.outputs, strict=True):
        value = env[place]
        values[handle] = value if isinstance(value, Poison) else Poison(failure)
    return RunOutcome([failure])


def environment_of(
    template: CompiledTemplate,
    work: RunRequest,
    slots: Sequence[Any],
    values: ValueTable,
    dense: Sequence[int] | None = None,
) -> Environment:
    """Return the environment of a run: constants, slots, inputs, and None for each computed value.

    A missing input is poison. `dense`: positions of inputs that are copied to dense memory if they grow; None: all.
    """
    if values.growing:
        values.densify(work.inputs if dense is None else [work.inputs[position] for position in dense])
    try:
        inputs = [*map(values.table.__getitem__, work.inputs)]
    except KeyError:
        inputs = [_value_or_poison(values, handle, work.sequence) for handle in work.inputs]
    return [*template.constants, *slots, *inputs, *([None] * template.computed)]


class FailedStep(Exception):  # noqa: N818 - a signal between two functions
    """Step `step` raised `error`."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.error = error


class CancelledStep(Exception):  # noqa: N818 - a signal between two functions
    """Step `step` and all later steps are cancelled."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def _advance(
    steps: Sequence[CompiledStep],
    start: int,
    stop: int,
    env: Environment,
    claims: Mapping[int, list[Claim]],
    run: RunOutcome,
) -> int:
    """Run the steps from `start` to `stop` (exclusive), and return `stop`.

    `claims`: predicted layouts by step. `run`: receives layout mismatches and progress.

    Raises:
        FailedStep: a step failed.
        CancelledStep: the submission was cancelled.
    """
    step = start
    try:
        for step in numbers_of(run, start, stop):
            if run.halt.value:
                raise CancelledStep(step)
            step_claims = claims.get(step)
            if step_claims is None:
                steps[step].run(env)
                continue
            steps[step].store(env)
            apply_claims(steps[step], step_claims, env, run)
            for place in steps[step].release:
                env[place] = None
    except CancelledStep:
        raise
    except Exception as error:
        raise FailedStep(step, error) from error
    return stop


def _advance_natively(
    native: NativeReplay,
    steps: Sequence[CompiledStep],
    start: int,
    stop: int,
    env: Environment,
    claims: Mapping[int, list[Claim]],
    run: RunOutcome,
) -> int:
    """Run steps as `_advance` does. The native library runs the steps that it supports."""
    step = start
    while step < stop:
        end = min(native.ends[step], stop)
        if end - step < MIN_STEPS:
            step = _advance(steps, step, max(end, step + 1), env, claims, run)
            continue
        cell = None if run.progress is None else run.progress.cell(step)
        begun = step
        step, error = native.run(step, end, env, run.halt, cell)
        run.native_ops += step - begun
        if error is not None:
            raise FailedStep(step, error) from error
        if step < end:
            step = _advance(steps, step, end, env, claims, run)  # raises if the run is halted
    return stop


def numbers_of(run: RunOutcome, start: int, stop: int) -> Iterable[int]:
    """Return the numbers of the steps from `start` to `stop` (exclusive). `run.progress` tracks the iteration."""
    return range(start, stop) if run.progress is None else run.progress.over(start, stop)


def _advance_timed(
    times: OpTimes,
    steps: Sequence[CompiledStep],
    start: int,
    stop: int,
    env: Environment,
    claims: Mapping[int, list[Claim]],
    run: RunOutcome,
) -> int:
    """Run steps as `_advance` does, and time each step."""
    for step in range(start, stop):
        begun = times.begin()
        _advance(steps, step, step + 1, env, claims, run)
        try:
            times.end(step, begun)
        except RuntimeError as error:  # the device has failed
            raise FailedStep(step, error) from error
    return stop


def _advance_guarded(
    guard: StepGuard,
    steps: Sequence[CompiledStep],
    start: int,
    stop: int,
    env: Environment,
    claims: Mapping[int, list[Claim]],
    run: RunOutcome,
) -> int:
    """Run steps as `_advance` does, and call the guard before and after each step."""
    for step in range(start, stop):
        if run.halt.value:
            raise CancelledStep(step)
        with guard.lock:
            try:
                guard.before(step, steps[step], env)
            except Exception as error:
                raise FailedStep(step, error) from error
            _advance(steps, step, step + 1, env, claims, run)
            guard.after(step, steps[step], env)
    return stop


def _make_resizable(
    step: CompiledStep, stop: FailedStep, env: Environment, values: ValueTable, sharing: MemorySharing
) -> bool:
    """Copy operands that `step` could not resize, which are uploads, into memory of PyTorch's allocator.

    Return False if the step failed for another reason, or if memory is short. The shortage then becomes its error.
    """
    if not isinstance(stop.error, RuntimeError) or "storage that is not resizable" not in str(stop.error):
        return False
    unresizable = [
        p for p in step.writes if isinstance(env[p], torch.Tensor) and not env[p].untyped_storage().resizable()
    ]
    try:
        for place in unresizable:
            memory = memory_of(env[place])
            places, handles = sharing.places(memory, stop.step), sharing.handles(NO_HANDLE, memory, stop.step)
            shared = [*[env[p] for p in places], *[values[handle] for handle in handles if handle in values]]
            _copy_to_new_memory(env[place].untyped_storage(), memory, shared)
            sharing.on_reallocation(place)
    except RuntimeError as error:
        stop.error = error
        return False
    return bool(unresizable)


def _copy_to_new_memory(storage: torch.UntypedStorage, memory: int, values: Iterable[Any]) -> None:
    """Copy a storage, and let all tensors among `values` that view it view the copy. `memory`: their `memory_of`."""
    tensors = {id(v): v for v in values if isinstance(v, torch.Tensor) and memory_of(v) == memory}
    metas = {key: meta_of(tensor) for key, tensor in tensors.items()}
    copy = storage.clone()
    # The failed op may have set new sizes already.
    needed_bytes = max(meta.extent * meta.dtype.itemsize for meta in metas.values())
    if (present_bytes := copy.nbytes()) < needed_bytes:
        copy.resize_(needed_bytes)
        zero_fill(copy, present_bytes)
    for key, tensor in tensors.items():
        tensor.set_(copy, metas[key].offset, metas[key].shape, metas[key].stride)


def _restore_overwritten(
    at: int, step: CompiledStep, env: Environment, values: ValueTable, sharing: MemorySharing
) -> bool:
    """Make poisoned operands valid again if step number `at` overwrites them completely. Otherwise return False."""
    poisoned = {place for place in step.reads if isinstance(env[place], Poison)}
    if step.op not in _OVERWRITES or not poisoned or not poisoned <= set(step.writes):
        return False
    memories = [env[place].memory for place in poisoned]
    if not all(memory is not None and _is_all_of_its_storage(memory) for memory in memories):
        return False
    for address in {memory.untyped_storage().data_ptr() for memory in memories}:
        for place in sharing.places(address, at):
            value = env[place]
            env[place] = value.tensor_at(address) if isinstance(value, Poison) else value
        values.restore(sharing.handles(NO_HANDLE, address, at), address)
    return True


def _is_all_of_its_storage(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous and covers its whole storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _by_instruction(claims: Sequence[Claim]) -> dict[int, list[Claim]]:
    claims_by_step: dict[int, list[Claim]] = {}
    for claim in claims:
        claims_by_step.setdefault(claim.instruction, []).append(claim)
    return claims_by_step


def apply_claims(step: CompiledStep, claims: Sequence[Claim], env: Environment, run: RunOutcome) -> None:
    """Copy results to the strides that the client predicted, if the kernel chose different strides.

    Raises:
        DjinnError: the shape or dtype differs from the prediction.
    """
    places = dict(step.makes)
    for claim in claims:
        place = places.get(claim.result)
        tensor = env[place] if place is not None else None
        if place is None or (type(tensor) is not torch.Tensor and not isinstance(tensor, torch.Tensor)):
            continue
        if tensor.shape != claim.shape or tensor.dtype is not dtype_called(claim.dtype):
            raise DjinnError(
                f"{step.op} returned a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, but the client predicted "
                f"{claim.shape} and {claim.dtype}; please report this op"
            )
        if tensor.stride() != claim.stride:
            env[place] = copy_with_strides(tensor, claim.stride)
            run.layout_mismatches.append(LayoutMismatch(claim.instruction, claim.result, tensor.stride()))


def _value_or_poison(values: ValueTable, handle: int, sequence: int) -> Any:
    if handle in values:
        return values[handle]
    return Poison(no_such_value(sequence, handle))


def _poison(
    template: CompiledTemplate,
    stop: FailedStep,
    work: RunRequest,
    env: Environment,
    sharing: MemorySharing,
    run: RunOutcome,
) -> None:
    step = template.steps[stop.step]
    inherited = next((env[p] for p in step.reads if isinstance(env[p], Poison)), None)
    if inherited is not None:
        poison = Poison(inherited.failure)  # without `memory`, which belongs to the operand
    else:
        kind = type(stop.error).__name__
        failure = Failure(work.sequence, stop.step, step.op, kind, str(stop.error)[: limits.FAILURE_TEXT])
        run.failures.append(failure)
        poison = Poison(failure)
    sharing.poison(stop.step, poison)
