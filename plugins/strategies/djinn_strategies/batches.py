"""The run strategy `batches`: run a template once for several sessions that wait with the same template."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import attrs

from djinn_core.errors import DjinnError, StartupError
from djinn_core.hookspecs import hookimpl
from djinn_core.logs import get_logger
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, StrategyContext, TemplateFacts
from djinn_server.running.arbiter import ServedFacts
from djinn_server.running.drawing import draws_of
from djinn_server.running.input_aliases import aliases_of
from djinn_server.shared_device import SharedDevice
from djinn_strategies.batching.batch import Batch, BatchedTemplate, PendingRun
from djinn_strategies.batching.products import find_products
from djinn_strategies.batching.rows import find_rows
from djinn_strategies.batching.trial import BatchTrial
from djinn_strategies.batching.weights import PackedWeights

djinn_api_version = "2.0"
MAX_SETTINGS: Final = 8  # numeric settings under which a template is tried
MAX_SESSIONS: Final = 32  # sessions in a batch
MAX_PATIENCE_SECONDS: Final = 0.001  # time limit for sessions of the previous batch to join
PATIENCE_SHARE: Final = 0.25  # time limit as a share of the template's run time
_log = get_logger("djinn.server")


@attrs.define
class BatchCounters:
    """Counters of the batches on one device. `/metrics` shows them under their names.

    Attributes:
        batches: runs of a template for several sessions.
        batched_submissions: submissions that ran in a batch.
        batched_products: matrix products that were computed for several sessions at once.
        batched_rows: row-wise instructions that were computed for several sessions at once.
    """

    batches: int = 0
    batched_submissions: int = 0
    batched_products: int = 0
    batched_rows: int = 0


class Batches(RunStrategy):
    """Run submissions of several sessions together on one device.

    Attributes:
        counts: counters since the executor started.
        packed: copies of weights, packed for products with few rows.
    """

    name = "batches"
    exact = False
    joins_sessions = True
    on_request = True
    packed: PackedWeights
    _device: SharedDevice

    def __init__(self) -> None:
        self.counts = BatchCounters()

    def begin(self, context: StrategyContext) -> bool:
        """Prepare batches, as in `RunStrategy.begin`. Raise if the device has a memory limit or is simulated."""
        self._device = device = context.device
        excluded = {"--memory-gib": device.ledger, "a simulated device": device.timekeeper}
        for name, part in excluded.items():
            if part is not None:
                raise StartupError(f"--batch-sessions and {name} exclude each other: leave one of them out")
        self.packed = PackedWeights(device.runtime)
        return True

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer if the template multiplies by inputs that it does not write; otherwise None."""
        if not isinstance(template, ServedFacts):
            return None
        compiled, aliases = template.template, aliases_of(template.template, self._device.own)
        products = find_products(compiled, aliases)
        if not products:
            return None
        rows, name = find_rows(compiled, aliases.written_inputs), template.digest.hex()[:8]
        return BatchedTemplate(self.run_joined, compiled, products, rows, draws_of(compiled), name)

    def figures(self) -> Mapping[str, float]:
        """Return the counters, and the bytes of the packed weights."""
        return {**attrs.asdict(self.counts), "batch_weight_bytes": self.packed.nbytes}

    def _gather(self, pending: PendingRun) -> Sequence[PendingRun]:
        """Return runs of other sessions that join `pending`. These sessions then wait for the end of the batch."""
        share = pending.owner.share
        if not share.group and not self._device.turns.waiting:
            return ()
        batched, trial = pending.batched, self._trial(pending)
        if trial.pause:
            trial.pause, share.group = trial.pause - 1, ()
            return ()
        min_joins = 2 * trial.slow_sessions or 2
        patience = min(MAX_PATIENCE_SECONDS, PATIENCE_SHARE * batched.seconds)
        waiting = self._device.turns.gather(share, pending.joins, patience, range(min_joins - 1, MAX_SESSIONS))
        if not waiting:
            share.group = ()
        return [run.pending for run in waiting if isinstance(run.pending, PendingRun)]

    def run_joined(self, pending: PendingRun) -> Generator[None, None, None]:
        """Run `pending` and the runs that join it in one batch, and set their outcomes. Do nothing if no run joins."""
        others = self._gather(pending)
        if not others:
            return
        resume = partial(self._device.numeric_settings.compute_under, pending.owner.settings)
        resume()
        batch = Batch((pending, *others), self._trial(pending), self._device.randomness, resume)
        start = time.perf_counter()
        try:
            yield from batch.run()
        finally:
            self._end_batch(batch, start)

    def _end_batch(self, batch: Batch, start: float) -> None:
        """Wake all sessions of the batch, and count the batch."""
        first, group = batch.members[0], tuple([member.owner.share for member in batch.members])
        for member in batch.members:
            member.batch_start = start
            member.owner.share.group = group
            if member.outcome is None and member.error is None:
                member.error = DjinnError("another program in the same batch failed, so this program did not finish")
        self._device.turns.release(group[0])
        self.counts.batches += 1
        self.counts.batched_submissions += len(batch.members)
        self.counts.batched_products += batch.products
        self.counts.batched_rows += batch.rows
        trial = batch.trial
        if trial.decide(batch.products):
            outcome = "runs in batches" if trial.methods else "does not run in batches"
            _log.info(f"a template {outcome}", template=first.batched.name, sessions=len(group), reason=trial.reason)

    def _trial(self, pending: PendingRun) -> BatchTrial:
        trials, settings = pending.batched.trials.setdefault(pending.weight, {}), pending.owner.settings
        trial = trials.get(settings)
        if trial is None:
            if len(trials) >= MAX_SETTINGS:
                trials.clear()
            products, rows = pending.batched.products, pending.batched.rows.steps
            trial = trials[settings] = BatchTrial(products, rows, self.packed, self._device.timer)
        return trial


@hookimpl
def djinn_register_run_strategies() -> Iterable[RunStrategy]:
    """Register the run strategy `batches`."""
    return [Batches()]
