"""Batches on a device: sessions that wait with the same template run it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Final

import attrs

from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_server.batching.batch import Batch, BatchedTemplate, PendingRun
from djinn_server.batching.products import draws_of, find_products
from djinn_server.batching.rows import find_rows
from djinn_server.batching.trial import BatchTrial
from djinn_server.batching.weights import PackedWeights
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.fair_share import FairShare
from djinn_server.running.input_aliases import InputAliases
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.random_state import DeviceRandomness
from djinn_server.running.run import RunOutcome
from djinn_server.running.template_compiler import CompiledTemplate

TEMPLATES: Final = 1024
SETTINGS: Final = 8  # numeric settings under which a template is tried
MOST_SESSIONS: Final = 32  # in a batch
PATIENCE_SECONDS: Final = 0.001  # wait limit for the sessions of the previous batch
PATIENCE_SHARE: Final = 0.25  # as a share of the template's run time
_log = get_logger("djinn.server")


@attrs.define
class BatchCounters:
    """Counters of a device's batches, under their names in `/metrics`.

    Attributes:
        batches: runs of a template for several sessions. batched_submissions: submissions in batches.
        batched_products, batched_rows: products, and adjacent instructions, that were computed for several sessions at
            once.
    """

    batches: int = 0
    batched_submissions: int = 0
    batched_products: int = 0
    batched_rows: int = 0


class SessionBatches:
    """The batches of a device. All methods but `template` are called by the session whose turn it is.

    Attributes:
        counts: counters since the executor began.
        packed: copies of weights.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        timer: DeviceTimer,
        turns: FairShare,
        randomness: DeviceRandomness,
        numeric_settings: ProcessNumericSettings,
    ) -> None:
        self._timer = timer
        self._turns = turns
        self._randomness = randomness
        self._numeric_settings = numeric_settings
        self._templates: LruCache[bytes, BatchedTemplate] = LruCache(TEMPLATES)
        self._lock = threading.Lock()
        self.packed = PackedWeights(runtime)
        self.counts = BatchCounters()

    def template(self, digest: bytes, template: CompiledTemplate, aliases: InputAliases) -> BatchedTemplate:
        """Return the record of a template, shared by all sessions."""
        with self._lock:
            found = self._templates.use(digest)
            if found is None or found.template is not template:
                products = find_products(template, aliases)
                rows = find_rows(template, aliases.written)
                found = BatchedTemplate(template, products, rows, draws_of(template), digest.hex()[:8])
                self._templates.store(digest, found)
        return found

    def gather(self, pending: PendingRun) -> Sequence[PendingRun]:
        """Return the runs of other sessions that join this one. Their sessions wait until `run` returns."""
        share = pending.owner.share
        if not share.group and not self._turns.waiting:
            return ()
        batched, trial = pending.batched, self._trial(pending)
        if trial.pause:
            trial.pause, share.group = trial.pause - 1, ()
            return ()
        least = 2 * trial.refused or 2
        patience = min(PATIENCE_SECONDS, PATIENCE_SHARE * batched.seconds)
        joined = self._turns.gather(share, pending.joins, patience, range(least - 1, MOST_SESSIONS))
        if not joined:
            share.group = ()
        return [one.pending for one in joined if isinstance(one.pending, PendingRun)]

    def run(self, pending: PendingRun, joined: Sequence[PendingRun]) -> Generator[None, None, RunOutcome]:
        """Run all of them, and return the outcome of the first.

        Raises:
            Exception: an error of the executor, not of an op.
        """
        settings = pending.owner.settings
        resume = partial(self._numeric_settings.compute_under, settings)
        batch = Batch((pending, *joined), self._trial(pending), self._randomness, resume)
        began = time.perf_counter()
        try:
            yield from batch.run()
        finally:
            self._end(batch, began)
        return pending.result()

    def _end(self, batch: Batch, began: float) -> None:
        """Wake all sessions of the batch."""
        first, group = batch.members[0], tuple([one.owner.share for one in batch.members])
        for one in batch.members:
            one.began = began
            one.owner.share.group = group
            if one.outcome is None and one.error is None:
                one.error = DjinnError("the batch of this program was broken off by another one's error")
        self._turns.release(group[0])
        self.counts.batches += 1
        self.counts.batched_submissions += len(batch.members)
        self.counts.batched_products += batch.products
        self.counts.batched_rows += batch.rows
        trial = batch.trial
        if trial.decide(batch.products):
            found = "runs in batches" if trial.ways else "does not run in batches"
            _log.info(f"a template {found}", template=first.batched.name, sessions=len(group), reason=trial.reason)

    def _trial(self, pending: PendingRun) -> BatchTrial:
        trials, settings = pending.batched.trials.setdefault(pending.weight, {}), pending.owner.settings
        trial = trials.get(settings)
        if trial is None:
            if len(trials) >= SETTINGS:
                trials.clear()
            products, rows = pending.batched.products, pending.batched.rows.steps
            trial = trials[settings] = BatchTrial(products, rows, self.packed, self._timer)
        return trial
