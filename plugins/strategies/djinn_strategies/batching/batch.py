"""Run one template for several sessions in a batch.

Most instructions run separately for each session. Therefore the caches of the sessions may differ in length, and one
session may fail alone. Products with a shared weight are computed once for all sessions, so the device reads the weight
from memory once. Row-wise instructions next to a product are batched as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_core.ir.handles import storage_of
from djinn_core.logs import get_logger
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_server.hookspecs.run_strategies import JointRun, RunOffer, StrategyRun
from djinn_server.running.cancellation import LOOK_SECONDS
from djinn_server.running.compiled_step import Environment
from djinn_server.running.drawing import Draws
from djinn_server.running.fair_share import Steps
from djinn_server.running.joint_runs import JoinableSubmission
from djinn_server.running.random_state import DeviceRandomness
from djinn_server.running.run import RunOutcome, TemplateRun
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_strategies.batching.joined_runs import JoinedRuns, Rows, is_plain, is_same
from djinn_strategies.batching.products import Product
from djinn_strategies.batching.rows import RowStep, RowSteps
from djinn_strategies.batching.trial import BatchTrial, Operands, split_rows

_log = get_logger("djinn.server")


@attrs.define(eq=False)
class BatchedTemplate(RunOffer):
    """Offer to run a template in batches.

    Attributes:
        run_joined: runs a pending run in a batch with runs of other sessions. If no run joins, it does nothing.
        template: the compiled template.
        products: products that a batch computes once for all sessions.
        rows: row-wise instructions, which a batch computes once for all sessions if they are next to a product.
        draws: random draws of the template.
        name: the first digits of the template's digest, for logs.
        seconds: device time of the latest run of one session.
        trials: trials by storage of the first weight, then by numeric settings.
        product_indexes: index in `products`, by number of the instruction.
        rows_by_step: row-wise instructions, by number of the instruction.
    """

    run_joined: Callable[[PendingRun], Generator[None, None, None]]
    template: CompiledTemplate
    products: tuple[Product, ...]
    rows: RowSteps
    draws: Draws
    name: str
    seconds: float = 0.0
    trials: WeakKeyDictionary[torch.UntypedStorage, dict[NumericSettings, BatchTrial]] = attrs.field(
        factory=WeakKeyDictionary
    )
    product_indexes: dict[int, int] = attrs.field(init=False)
    rows_by_step: dict[int, RowStep] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.product_indexes = {product.step: number for number, product in enumerate(self.products)}
        self.rows_by_step = {row.step: row for row in self.rows.steps}

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the ops of a single session, without a batch."""
        yield from run.advance()

    def join(self, submission: JoinableSubmission) -> JointRun | None:
        """Return the submission as a run that can join a batch, or None if its first weight is a tensor subclass."""
        weight = submission.values.table.get(submission.work.inputs[self.products[0].source])
        return PendingRun(self, submission, weight.untyped_storage()) if type(weight) is torch.Tensor else None


@attrs.define(eq=False)
class PendingRun(JointRun):
    """A run whose session waits for the device.

    Attributes:
        batched: the offer of the template.
        owner: the submission and its session.
        weight: storage of the first weight. Sessions of one model share this storage.
        progress: state of the run in a batch.
        outcome: result of the run, if a batch has finished it.
        error: error of the run, if a batch has finished it.
        batch_start: `time.perf_counter()` at the start of the batch, or 0.0 without a batch.
    """

    batched: BatchedTemplate
    owner: JoinableSubmission
    weight: torch.UntypedStorage
    progress: TemplateRun | None = None
    outcome: RunOutcome | None = None
    error: Exception | None = None
    batch_start: float = 0.0

    @property
    def is_finished(self) -> bool:
        """True if a batch of another session has finished this run."""
        return self.outcome is not None or self.error is not None

    def run(self) -> Generator[None, None, RunOutcome | None]:
        """Run the submission in a batch with submissions of other sessions, as `JointRun.run` does."""
        if not self.is_finished:
            yield from self.batched.run_joined(self)
        if self.error is not None:
            raise self.error
        return self.outcome

    def ended(self, seconds: float) -> float | None:
        """Record the time of the run, as `JointRun.ended` does."""
        self.batched.seconds = seconds
        return self.batch_start or None

    def joins(self, other: object) -> bool:
        """Return True if `other` runs the same template with the same weights and numeric settings."""
        return (
            isinstance(other, PendingRun)
            and other.batched is self.batched
            and other.weight is self.weight
            and other.owner.settings == self.owner.settings
        )


class Batch:
    """Runs of one template for several sessions. Every session waits until the batch has finished.

    Attributes:
        members: the runs.
        trial: decides which instructions are batched.
        batched: the offer of their template.
        products: number of products that were computed once for several runs.
        rows: number of row-wise instructions that were computed once for several runs.
    """

    def __init__(
        self, members: Sequence[PendingRun], trial: BatchTrial, randomness: DeviceRandomness, resume: Callable[[], None]
    ) -> None:
        """Prepare a batch. `resume` is called each time the batch gets the device back from other sessions."""
        self.members = members
        self.trial = trial
        self.products = self.rows = 0
        self.batched = members[0].batched
        self._last_runs: JoinedRuns | None = None
        self._randomness = randomness
        self._resume = resume

    def run(self) -> Steps:
        """Run all members, and yield every `LOOK_SECONDS` so that other sessions can use the device.

        An exception in one run does not affect the other runs.
        """
        self.trial.begin(len(self.members))
        for member in self.members:
            self._run_guarded(member, self._begin)
        last_pause, at = time.perf_counter(), 0
        for chain in self.trial.chains:
            for number in chain:
                if number >= at:
                    for member in self.members:
                        self._run_guarded(member, partial(self._advance, stop=number))
                    at = self._run_chain(number, chain.stop)
            if time.perf_counter() - last_pause >= LOOK_SECONDS:
                yield
                last_pause = time.perf_counter()
                self._resume()
        for member in self.members:
            self._run_guarded(member, self._finish)

    def _run_guarded(self, member: PendingRun, work: Callable[[PendingRun], None]) -> None:
        if member.error is None:
            try:
                work(member)
            except Exception as error:
                member.error = error

    def _begin(self, member: PendingRun) -> None:
        owner, work = member.owner, member.owner.work
        if owner.shares.storages or owner.shares.names:
            owner.shares.before_run(owner.aliases, work.inputs, work.outputs)
        member.progress = TemplateRun(member.batched.template, work, owner.slots, owner.values)

    def _advance(self, member: PendingRun, stop: int | None = None) -> None:
        assert member.progress is not None
        if stop is not None and member.progress.step >= stop:
            return
        if member.batched.draws.first_draw(member.owner.slots) is not None:
            self._randomness.hand_to(member.owner.randomness)
        member.progress.advance(stop)

    def _finish(self, member: PendingRun) -> None:
        self._advance(member)
        assert member.progress is not None
        member.outcome = member.progress.finish()
        member.outcome.may_round_differently = True

    def _run_chain(self, start: int, stop: int) -> int:
        """Compute instructions from `start` to before `stop` for all runs that have reached `start`.

        Return the first instruction that still has to run.
        """
        runs = self._runs_at(start)
        if len(runs) < 2:
            return start + 1
        joined = self._last_runs
        if joined is None or not joined.is_for(runs):
            joined = self._last_runs = JoinedRuns(runs, self.batched.rows.unwritten)
        step = self._run_recorded_chain(joined, start)
        if step == start:
            joined.begin()
            while step < stop and self._compute(joined, step):
                joined.drop(self.batched.template.steps[step].release)
                step += 1
            self.trial.remember(start, joined.record_chain(step))
        try:
            joined.scatter(step)
        except RuntimeError as error:  # out of memory: each run computes it separately
            _log.debug("results of a batch cannot be distributed", error=repr(error))
            self._last_runs = None
        return max(step, start + 1)

    def _runs_at(self, start: int) -> Sequence[TemplateRun]:
        """Return the runs that have reached instruction `start` and whose operands can be joined."""
        runs = [member.progress for member in self.members if member.error is None and member.progress is not None]
        runs = [run for run in runs if run.step == start and not run.outcome.halt.value and not run.claims]
        number = self.batched.product_indexes.get(start)
        if number is None:
            reads = self.batched.template.steps[start].reads
            return [run for run in runs if all(type(run.env[place]) is torch.Tensor for place in reads)]
        product = self.batched.products[number]
        runs = [run for run in runs if _is_row_product(product, run.env[product.rows], run.env[product.weight])]
        return [run for run in runs if _has_same_weight(product, runs[0].env, run.env)]

    def _compute(self, joined: JoinedRuns, step: int) -> bool:
        """Compute instruction `step` once for all runs. During a trial, also compute it separately for each run.

        Return False if the instruction has to run separately for each run.
        """
        number = self.batched.product_indexes.get(step)
        try:
            with torch.inference_mode():
                if number is not None:
                    is_batched = self._multiply(joined, self.batched.products[number])
                elif self.trial.is_measuring:
                    is_batched = self._try_row(joined, self.batched.rows_by_step[step])
                else:
                    is_batched = self._compute_row(joined, self.batched.rows_by_step[step])
        except Exception as error:
            op = self.batched.template.steps[step].op
            _log.debug("an instruction cannot be batched", op=op, error=repr(error))
            return False
        return is_batched

    def _run_recorded_chain(self, joined: JoinedRuns, start: int) -> int:
        """Compute the recorded chain that begins at instruction `start`, if it exists and fits.

        Return the first instruction that still has to run.
        """
        chain = self.trial.recorded_chains.get((start, len(joined.runs)))
        if chain is None:
            return start
        env, steps = joined.env, self.batched.template.steps
        try:
            with torch.inference_mode():
                if not joined.prepare_chain(chain):
                    return start
                for step in range(start, chain.stop):
                    number = self.batched.product_indexes.get(step)
                    if number is None:
                        steps[step].run(env)
                        self.rows += 1
                    else:
                        self._multiply_recorded(env, number)
        except Exception as error:
            _log.debug("a recorded chain of instructions cannot be batched", error=repr(error))
            joined.clear()
            return start
        joined.store_chain(chain)
        return chain.stop

    def _multiply_recorded(self, env: Environment, number: int) -> None:
        product = self.batched.products[number]
        bias = None if product.bias is None else env[product.bias]
        result = self.trial.compute(number, Operands(env[product.rows], (), env[product.weight], bias))
        if result is None:
            raise RuntimeError("the packed copy of the weight was freed")
        env[product.place] = result
        for place in product.release:
            env[place] = None
        self.products += 1

    def _compute_row(self, joined: JoinedRuns, row: RowStep) -> bool:
        sizes = joined.prepare_step(row)
        if sizes is None:
            return False
        joined.store(row.place, Rows(joined.compute(row), sizes))
        self.rows += 1
        return True

    def _try_row(self, joined: JoinedRuns, row: RowStep) -> bool:
        joined.scatter(row.step)
        sizes = joined.prepare_step(row)
        if sizes is None:
            return False
        compute_one = _compute_alone(joined, row.step, row.place)
        results = self.trial.try_row(row.step, sizes, compute_one, partial(joined.compute, row))
        joined.store_separate(row.step, row.place, results)
        return True

    def _multiply(self, joined: JoinedRuns, product: Product) -> bool:
        """Compute a product once for all runs. Return False if that is impossible or not worthwhile."""
        first, number = joined.runs[0].env, self.batched.product_indexes[product.step]
        rows = joined.rows(product.rows) or joined.flat_rows(product.rows)
        if rows is None or not _is_row_product(product, rows.whole, first[product.weight]):
            return False
        bias = None if product.bias is None else first[product.bias]
        places = (product.weight,) if product.bias is None else (product.weight, product.bias)
        if (bias is not None and bias.dim() != 1) or not all(map(joined.shared, places)):
            return False
        operands = Operands(rows.whole, rows.sizes, first[product.weight], bias)
        if not self.trial.is_measuring:
            result = self.trial.compute(number, operands)
            if result is None:
                return False
            if joined.has_rows(product.rows):
                joined.store(product.place, Rows(result, rows.sizes))
            else:
                shapes = [torch.Size((*run.env[product.rows].shape[:-1], result.shape[-1])) for run in joined.runs]
                joined.store_separate(product.step, product.place, split_rows(result, rows.sizes, shapes))
        else:
            joined.scatter(product.step)
            compute_one = _compute_alone(joined, product.step, product.place)
            results = self.trial.try_product(number, operands, compute_one, self._is_shared(product))
            joined.store_separate(product.step, product.place, results)
        self.products += 1
        return True

    def _is_shared(self, product: Product) -> bool:
        """Return True if all sessions share the weight. A session that writes first gets its own copy."""
        return all(
            storage_of(member.owner.work.inputs[product.source]) in member.owner.shares.storages
            for member in self.members
        )


def _compute_alone(joined: JoinedRuns, step: int, place: int) -> Callable[[int], torch.Tensor]:
    """Return a function from the index of a run to the result of instruction `step`, computed for that run alone."""
    store = joined.runs[0].template.steps[step].store

    def compute_one(session: int) -> torch.Tensor:
        store(joined.runs[session].env)
        return joined.runs[session].env[place]  # type: ignore[no-any-return]

    return compute_one


def _is_row_product(product: Product, rows: Any, weight: Any) -> bool:
    """Return True if the product can multiply `rows` with the matrix `weight`."""
    if type(rows) is not torch.Tensor or type(weight) is not torch.Tensor or weight.dim() != 2 or not rows.numel():
        return False
    has_matrix_rows = rows.dim() == 2 or (rows.dim() > 2 and product.op in {"aten::linear", "aten::matmul"})
    inner = weight.shape[1 if product.transposed else 0]
    return is_plain(rows) and has_matrix_rows and rows.shape[-1] == inner and rows.dtype is weight.dtype


def _has_same_weight(product: Product, first: Environment, second: Environment) -> bool:
    """Return True if the weight and the bias in two environments have the same memory and layout."""
    places = (product.weight,) if product.bias is None else (product.weight, product.bias)
    return first is second or all(is_same(first[place], second[place]) for place in places)
