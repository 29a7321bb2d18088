"""Rematerialization: recompute a result instead of spilling its bytes, where that takes less time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from djinn_core import torch_objects
from djinn_core.ir.operators import resolve
from djinn_core.ir.values import meta_of
from djinn_core.server.memory.allocation import Allocation, has_memory
from djinn_core.server.memory.lifetimes import NEVER
from djinn_core.server.memory.memory_estimate import MemoryEstimate
from djinn_core.server.running.template_compiler import CompiledTemplate, Environment


class Rematerialization:
    """Selects the results of a run that may be recomputed by the step that made them, from operands that are still there."""

    def __init__(self, template: CompiledTemplate, outlook: MemoryEstimate) -> None:
        self._template = template
        self._outlook = outlook
        self._lifetimes = outlook.lifetimes
        self._pure: dict[int, bool] = {}

    @staticmethod
    def seconds(holding: Allocation) -> float | None:
        """Time that recomputing this takes; None if it is not made by one step of the run alone, or others need it."""
        return None if holding.made_by < 0 or holding.holders or holding.needed else holding.seconds

    def possible(self, holding: Allocation, now: int, at: Mapping[int, Allocation]) -> bool:
        """True if this can be recomputed at its next use: its operands live on, and nothing of them is written into."""
        lifetimes, made_by = self._lifetimes, holding.made_by
        if self.seconds(holding) is None:
            return False
        until = min((lifetimes.next_use(place, now) for place in holding.places), default=NEVER)
        if until == NEVER or any(place in lifetimes.outputs for place in holding.places):
            return False
        step = self._template.steps[made_by]
        roots = self._outlook.roots
        concerned = {roots[place] for place in step.reads if place in roots} | {self._root(holding)}
        if any(root < 0 or self._outlook.is_written(root, made_by, until) for root in concerned):
            return False
        if any(lifetimes.lives_until(place) < until for place in step.reads):
            return False
        return self._is_pure(made_by) and not any(at[place].dropped for place in step.reads if place in at)

    def _is_pure(self, index: int) -> bool:
        """True if a step is deterministic, has no side effects, and its results have memory of their own."""
        pure = self._pure.get(index)
        if pure is None:
            step = self._template.steps[index]
            pure = not step.writes and step.op.startswith("aten::") and len(step.makes) <= 4
            pure = pure and torch.Tag.nondeterministic_seeded not in resolve(step.op).tags
            self._pure[index] = pure
        return pure

    def operands(self, holding: Allocation, at: Mapping[int, Allocation]) -> list[Allocation]:
        """Operands from which this can be recomputed."""
        return [at[place] for place in self._template.steps[holding.made_by].reads if place in at]

    def drop(self, holding: Allocation, at: Mapping[int, Allocation]) -> None:
        """It will be made again: its operands are kept, or kept elsewhere, until then."""
        holding.dropped = True
        for operand in self.operands(holding, at):
            operand.needed += 1

    def settle(self, holding: Allocation, at: Mapping[int, Allocation]) -> None:
        """Release the operands of a result that was recomputed or is no longer needed."""
        holding.dropped = False
        for operand in self.operands(holding, at):
            operand.needed -= 1

    def remake(self, holding: Allocation, env: Environment, at: Mapping[int, Allocation]) -> None:
        """Run the step once more, and have everything that looked into the old memory look into the new."""
        step = self._template.steps[holding.made_by]
        shadow = list(env)
        step.store(shadow)
        made = next(shadow[p] for _, p in step.makes if self._outlook.roots[p] == self._root(holding))
        storage = made.untyped_storage()
        for place in holding.places:
            value = env[place]
            if has_memory(value):
                meta = meta_of(value)
                value.set_(storage, meta.offset, meta.shape, meta.stride)
        self.settle(holding, at)
        holding.storage, holding.key, holding.resident = storage, torch_objects.number_of_storage(storage), True

    def _root(self, holding: Allocation) -> int:
        return next(self._outlook.roots.get(place, -1) for place in holding.places)
