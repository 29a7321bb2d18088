"""A batch: runs of one template by several sessions.

The instructions of each session run one by one, as ever, so caches may be of any length, values are written in place and ops may fail.
Only products with a weight that the sessions share are computed for all of them at once: the weight is read from memory once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_core.ir.values import storage_of
from djinn_core.logs import get_logger
from djinn_core.server.batching.products import Draws, Product
from djinn_core.server.batching.trial import Operands, Trial
from djinn_core.server.running.cancellation import LOOK_SECONDS
from djinn_core.server.running.fair_share import Share
from djinn_core.server.running.input_aliases import InputAliases
from djinn_core.server.running.random_state import DeviceRandomness, SessionRandomness
from djinn_core.server.running.run import RunOutcome, TemplateRun
from djinn_core.server.running.run_request import RunRequest
from djinn_core.server.running.template_compiler import CompiledTemplate, Environment
from djinn_core.server.running.values import ValueTable
from djinn_core.server.weights.shared_weights import SessionShares
from djinn_core.wire.numeric_messages import NumericSettings

_log = get_logger("djinn.server")


@attrs.define(eq=False)
class BatchedTemplate:
    """A template that may run in batches.

    Attributes:
        products: those that are computed for several sessions at once. draws: its random numbers.
        seconds: what a run took for each session the last time.
        trials: by the memory of the first weight and the numeric settings.
    """

    template: CompiledTemplate
    products: tuple[Product, ...]
    draws: Draws
    name: str
    seconds: float = 0.0
    trials: WeakKeyDictionary[torch.UntypedStorage, dict[NumericSettings, Trial]] = attrs.field(
        factory=WeakKeyDictionary
    )


@attrs.frozen(eq=False)
class BatchMember:
    """The parts of a session that a batch needs."""

    values: ValueTable
    shares: SessionShares
    randomness: SessionRandomness
    settings: NumericSettings
    share: Share


@attrs.define(eq=False)
class PendingRun:
    """A run that a session waits for its turn with.

    Attributes:
        weight: memory of the first weight, which is the same for sessions of one model.
        outcome, error: what came of it in a batch. began, seconds: when the batch began, and this run's part of the time.
    """

    batched: BatchedTemplate
    work: RunRequest
    slots: Sequence[Any]
    aliases: InputAliases
    owner: BatchMember
    weight: torch.UntypedStorage
    run: TemplateRun | None = None
    outcome: RunOutcome | None = None
    error: Exception | None = None
    began: float = 0.0
    seconds: float = 0.0

    def result(self) -> RunOutcome:
        """The outcome of the run in its batch.

        Raises:
            Exception: an error of the executor's own, which is no op's.
        """
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome

    def timed(self, began: float, seconds: float) -> tuple[float, float]:
        """Its beginning and its seconds; for a run that was in no batch these are `began` and `seconds`."""
        if not self.seconds:
            self.batched.seconds = seconds
            return began, seconds
        return self.began, self.seconds

    def joins(self, other: object) -> bool:
        """True if `other` is a run of the same template with the same weights, under the same settings."""
        return (
            isinstance(other, PendingRun)
            and other.batched is self.batched
            and other.weight is self.weight
            and other.owner.settings == self.owner.settings
        )


def pending_run(
    batched: BatchedTemplate, work: RunRequest, slots: Sequence[Any], aliases: InputAliases, owner: BatchMember
) -> PendingRun | None:
    """A run of a session; None if it has no product that could be computed for several."""
    if not batched.products:
        return None
    weight = owner.values.table.get(work.inputs[batched.products[0].source])
    if type(weight) is not torch.Tensor:
        return None
    return PendingRun(batched, work, slots, aliases, owner, weight.untyped_storage())


class Batch:
    """Runs of one template, which wait until all of them have run.

    Attributes:
        members: the runs. products: how many products were computed for several of them at once.
        rested: seconds in which other sessions computed in the middle.
    """

    def __init__(
        self,
        members: Sequence[PendingRun],
        trial: Trial,
        randomness: DeviceRandomness,
        rest: Callable[[PendingRun], float],
    ) -> None:
        """`rest`: lets other sessions compute, and returns how long that took."""
        self.members = members
        self.trial = trial
        self.products = 0
        self.rested = 0.0
        self._randomness = randomness
        self._rest = rest

    def run(self) -> None:
        """Run all of them. An error of the executor's own is that run's alone."""
        for member in self.members:
            self._guarded(member, self._begin)
        looked = time.perf_counter()
        for number, product in enumerate(self.members[0].batched.products):
            for member in self.members:
                self._guarded(member, partial(self._advance, stop=product.step))
            self._join(number, product)
            if (now := time.perf_counter()) - looked >= LOOK_SECONDS:
                self.rested += self._rest(self.members[0])
                looked = now
        for member in self.members:
            self._guarded(member, self._finish)

    def _guarded(self, member: PendingRun, work: Callable[[PendingRun], None]) -> None:
        if member.error is None:
            try:
                work(member)
            except Exception as error:
                member.error = error

    def _begin(self, member: PendingRun) -> None:
        owner, work = member.owner, member.work
        if owner.shares.storages:
            owner.shares.before_run(member.aliases, work.inputs, work.outputs)
        member.run = TemplateRun(member.batched.template, work, member.slots, owner.values)

    def _advance(self, member: PendingRun, stop: int | None = None) -> None:
        assert member.run is not None
        if member.batched.draws.some(member.slots):
            self._randomness.hand_to(member.owner.randomness)
        member.run.advance(stop)

    def _finish(self, member: PendingRun) -> None:
        self._advance(member)
        assert member.run is not None
        member.outcome = member.run.finish()

    def _join(self, number: int, product: Product) -> None:
        """Compute a product for all runs that have come to it; the others compute it by themselves."""
        runs = [run for run in map(_healthy, self.members) if run is not None and _at(run, product)]
        first = next(iter(runs), None)
        runs = [run for run in runs if first is not None and _shares(product, first.env, run.env)]
        if first is None or len(runs) < 2:
            return
        env = first.env
        bias = None if product.bias is None else env[product.bias]
        operands = Operands([run.env[product.rows] for run in runs], env[product.weight], bias)
        step = first.template.steps[product.step]

        def alone(session: int) -> torch.Tensor:
            step.store(runs[session].env)
            return runs[session].env[product.place]  # type: ignore[no-any-return]

        try:
            with torch.inference_mode():
                results = self.trial.compute(number, operands, alone, self._unwritten(product))
        except Exception as error:
            _log.debug("a product is not computed for several sessions", op=product.op, error=repr(error))
            return
        if results is None:
            return
        for run, result in zip(runs, results, strict=True):
            run.pass_step(result)
        self.products += 1

    def _unwritten(self, product: Product) -> bool:
        """True if nothing ever writes the weight: each session would be given a copy of its own before."""
        return all(storage_of(one.work.inputs[product.source]) in one.owner.shares.storages for one in self.members)


def _healthy(member: PendingRun) -> TemplateRun | None:
    return member.run if member.error is None else None


def _at(run: TemplateRun, product: Product) -> bool:
    """True if the run has come to a product, whose operands are as they should be."""
    if run.step != product.step or run.outcome.halt or run.claims:
        return False
    rows, weight = run.env[product.rows], run.env[product.weight]
    if type(rows) is not torch.Tensor or type(weight) is not torch.Tensor or weight.dim() != 2 or not rows.numel():
        return False
    plain = rows.layout is torch.strided and not (rows.is_neg() or rows.is_conj())
    fits = rows.dim() == 2 or (rows.dim() > 2 and product.op in {"aten::linear", "aten::matmul"})
    inner = weight.shape[1 if product.transposed else 0]
    return plain and fits and rows.shape[-1] == inner and rows.dtype is weight.dtype


def _shares(product: Product, first: Environment, other: Environment) -> bool:
    """True if the weight and the bias of two sessions are the same memory, laid out alike."""
    places = (product.weight,) if product.bias is None else (product.weight, product.bias)
    for place in places:
        ours, theirs = first[place], other[place]
        if type(ours) is not torch.Tensor or type(theirs) is not torch.Tensor or ours.data_ptr() != theirs.data_ptr():
            return False
        if ours.shape != theirs.shape or ours.stride() != theirs.stride() or ours.dtype is not theirs.dtype:
            return False
    return product.bias is None or first[product.bias].dim() == 1
