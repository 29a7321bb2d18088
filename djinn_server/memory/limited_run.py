"""A run under a memory limit: before each step its operands are reloaded, and room is made for the step's allocations.

Where it takes less time, a result is computed again (rematerialization) instead of being spilled and reloaded.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from djinn_core import torch_private
from djinn_core.hookspecs.memory_policies import EvictionCandidate, SessionHints
from djinn_core.ir.operators import resolve
from djinn_core.ir.values import meta_of
from djinn_core.wire.messages import Claim
from djinn_server.memory.allocation import Allocation
from djinn_server.memory.eviction import Hints
from djinn_server.memory.ledger import Ledger
from djinn_server.memory.lifetimes import NEVER
from djinn_server.memory.memory_estimate import MemoryEstimate, bytes_of_step
from djinn_server.memory.room import is_out_of_memory
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.run import CancelledStep, FailedStep, RunOutcome, fulfil, numbers_of
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import has_memory


class Rematerialization:
    """Selects the results of a run that may be recomputed by the step that made them, from operands that are still there."""

    def __init__(self, template: CompiledTemplate, estimate: MemoryEstimate) -> None:
        self._template = template
        self._estimate = estimate
        self._lifetimes = estimate.lifetimes
        self._pure: dict[int, bool] = {}

    @staticmethod
    def seconds(holding: Allocation) -> float | None:
        """Seconds that recomputing this takes; None if several steps make it, or no step of this run, or if others need it."""
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
        roots = self._estimate.roots
        concerned = {roots[place] for place in step.reads if place in roots} | {self._root(holding)}
        if any(root < 0 or self._estimate.is_written(root, made_by, until) for root in concerned):
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
        """Note that the result was dropped: its operands are kept, or spilled, until it is recomputed."""
        holding.dropped = True
        for operand in self.operands(holding, at):
            operand.needed += 1

    def settle(self, holding: Allocation, at: Mapping[int, Allocation]) -> None:
        """Release the operands of a result that was recomputed or is no longer needed."""
        holding.dropped = False
        for operand in self.operands(holding, at):
            operand.needed -= 1

    def recompute(self, holding: Allocation, env: Environment, at: Mapping[int, Allocation]) -> None:
        """Run the step once more, and make every view of the old memory a view of the new."""
        step = self._template.steps[holding.made_by]
        shadow = list(env)
        step.store(shadow)
        made = next(shadow[p] for _, p in step.makes if self._estimate.roots[p] == self._root(holding))
        storage = made.untyped_storage()
        for place in holding.places:
            value = env[place]
            if has_memory(value):
                meta = meta_of(value)
                value.set_(storage, meta.offset, meta.shape, meta.stride)
        self.settle(holding, at)
        holding.storage, holding.key, holding.resident = storage, torch_private.number_of_storage(storage), True

    def _root(self, holding: Allocation) -> int:
        return next(self._estimate.roots.get(place, -1) for place in holding.places)


MEASURED = 64  # the process is looked at when the limit by this was made
LARGE = 256 << 10  # bytes; before so much is allocated the process is looked at as well


class LimitedRun:
    """One run of a template, as `MemoryGuard`."""

    def __init__(
        self, ledger: Ledger, template: CompiledTemplate, estimate: MemoryEstimate, hints: Hints, session: SessionHints
    ) -> None:
        """`hints`: about what outlives the run. `session`: about the session whose run it is."""
        self._ledger = ledger
        self._template = template
        self._estimate = estimate
        self._lifetimes = estimate.lifetimes
        self._hints = hints
        self._session = session
        self._env: Environment = []
        self._holdings: dict[int, Allocation] = {}
        self._at: dict[int, Allocation] = {}
        self._resident = 0
        self._step = -1
        self._relieved = -1  # the step for which all room was made
        self._peak = 0
        self._unmeasured = 0  # bytes that were made since the process was looked at
        self._recomputable = Rematerialization(template, estimate) if ledger.device.type == "cpu" else None

    def end(self) -> None:
        """The run is over."""
        self._ledger.end_run(self._peak)

    def advance(
        self,
        steps: Sequence[CompiledStep],
        start: int,
        stop: int,
        env: Environment,
        claims: Mapping[int, list[Claim]],
        run: RunOutcome,
    ) -> int:
        """As `MemoryGuard.advance`."""
        with self._ledger.lock:
            return self._advance(steps, start, stop, env, claims, run)

    def relieve(self, step: int, env: Environment) -> None:
        """As `MemoryGuard.relieve`."""
        with self._ledger.lock:
            self._begin(env)
            self._step = self._relieved = step
            self._make_all_room(self._operands(self._template.steps[step]))

    def _advance(
        self,
        steps: Sequence[CompiledStep],
        start: int,
        stop: int,
        env: Environment,
        claims: Mapping[int, list[Claim]],
        run: RunOutcome,
    ) -> int:
        self._begin(env)
        for index in numbers_of(run, start, stop):
            if run.halt.value:
                raise CancelledStep(index)
            self._step = index
            step = steps[index]
            try:
                self._prepare(index, step)
                began = time.perf_counter()
                self._store(step)
                seconds = time.perf_counter() - began
                again = index
                if index in claims:
                    fulfil(step, claims[index], env, run)
                    again = -1  # what was laid out again is not what the step makes
            except Exception as error:
                self._ledger.counts.refused += isinstance(error, torch.OutOfMemoryError)
                raise FailedStep(index, error) from error
            self._account(step, again, seconds)
        return stop

    # --- holdings -----------------------------------------------------------------------------------------

    def _begin(self, env: Environment) -> None:
        """Find the holdings of the run; once more after a step that failed, which may have changed any of them."""
        before = self._holdings
        self._env, self._at = env, {}
        self._holdings = holdings = self._ledger.survey()
        first = self._lifetimes.first_input
        for place in range(first, len(env)):
            value = env[place]
            if has_memory(value):
                key = torch_private.storage_key(value)
                known = before.get(key)
                if known is not None and key not in holdings:
                    known.places.clear()
                    holdings[key] = known
                holding = self._ledger.look(holdings, value)
                holding.places.add(place)
                self._at[place] = holding
        self._resident = sum(h.nbytes for h in holdings.values() if h.resident)

    def _account(self, step: CompiledStep, again: int, seconds: float) -> None:
        """Count what a step has made, changed and released. `again`: the step that can recompute its result, or -1."""
        env, at, holdings, made = self._env, self._at, self._holdings, 0
        for _, place in step.makes:
            value = env[place]
            if not has_memory(value):
                continue
            key = torch_private.storage_key(value)
            holding = holdings.get(key)
            if holding is None:
                storage = value.untyped_storage()
                holding = holdings[key] = Allocation(key, storage, storage.nbytes(), made_by=again, seconds=seconds)
                self._resident += holding.nbytes
                made += holding.nbytes
            holding.places.add(place)
            at[place] = holding
        self._unmeasured += made
        self._estimate.allocates[self._step] = max(self._estimate.allocates[self._step], made)
        for place in step.writes:
            self._count_again(place)
        self._note()
        if self._unmeasured > self._ledger.limit // MEASURED:
            self._ledger.measure(self._resident)
            self._unmeasured = 0
        for place in step.release:
            env[place] = None
            self._let_go(place)
        if self._resident > self._ledger.budget:
            self._room(0, ())

    def _count_again(self, place: int) -> None:
        """A step has written into the value at `place`: it may have another size now, or other memory."""
        value, holding = self._env[place], self._at.get(place)
        if holding is None or not has_memory(value):
            return
        if torch_private.storage_key(value) != holding.key:
            self._let_go(place)
            fresh = holding.key not in self._holdings
            holding = self._ledger.look(self._holdings, value)
            self._resident += holding.nbytes if fresh and not holding.places and not holding.holders else 0
            holding.places.add(place)
            self._at[place] = holding
        now = holding.storage.nbytes()
        self._resident += now - holding.nbytes
        holding.nbytes = now

    def _let_go(self, place: int) -> None:
        holding = self._at.pop(place, None)
        if holding is None:
            return
        holding.places.discard(place)
        if holding.places or holding.holders:
            return
        del self._holdings[holding.key]
        if holding.resident:
            self._resident -= holding.nbytes
        self._ledger.forget(holding.key)
        if holding.dropped and self._recomputable is not None:
            self._recomputable.settle(holding, self._at)

    # --- room ---------------------------------------------------------------------------------------------------

    def _prepare(self, index: int, step: CompiledStep) -> None:
        at = self._at
        operands = self._operands(step)
        for holding in operands:
            if not holding.resident:
                self._reload(holding, operands)
        needed = self._estimate.allocates[index]
        if self._resident + needed > self._ledger.budget:
            self._room(needed, operands)
            if self._resident + needed > self._ledger.limit:
                self._refuse_if_too_large(index, step)
        if needed >= LARGE:
            self._ledger.expect(needed)
        for place in step.writes:
            if place in at:
                self._ledger.written(at[place].key)

    def _refuse_if_too_large(self, index: int, step: CompiledStep) -> None:
        """Estimate a step again with its present operands, after the first estimate did not fit: the new one may be smaller.

        Raises:
            torch.OutOfMemoryError: the new estimate does not fit either.
        """
        needed = bytes_of_step(step, self._env)
        if needed is None:  # unknown; the op itself fails if it does not fit
            return
        self._estimate.allocates[index] = needed
        if self._resident + needed > self._ledger.limit:
            raise torch.OutOfMemoryError(self._ledger.refusal(needed, self._resident))

    def _store(self, step: CompiledStep) -> None:
        """Run a step; where the device has no memory for it after all, once more with as much room as can be made."""
        try:
            step.store(self._env)
        except (MemoryError, RuntimeError) as error:
            if step.writes or self._relieved == self._step or not is_out_of_memory(error):
                raise
            self._make_all_room(self._operands(step))
            step.store(self._env)

    def _operands(self, step: CompiledStep) -> list[Allocation]:
        return [self._at[place] for place in step.reads if place in self._at]

    def _make_all_room(self, keep: Collection[Allocation]) -> None:
        """Evict everything that can be evicted beside `keep`."""
        self._room(self._ledger.budget, keep)
        self._ledger.relieve()

    def _reload(self, holding: Allocation, keep: Collection[Allocation]) -> None:
        """Reload the memory of a holding.

        Raises:
            torch.OutOfMemoryError: there is no room for it beside `keep`.
        """
        self._room(holding.nbytes, keep)
        if self._resident + holding.nbytes > self._ledger.limit:
            raise torch.OutOfMemoryError(self._ledger.refusal(holding.nbytes, self._resident))
        if holding.nbytes >= LARGE:
            self._ledger.expect(holding.nbytes)
        if holding.dropped and self._recomputable is not None:
            self._recompute(self._recomputable, holding, keep)
        else:
            try:
                self._ledger.restore(holding)
            except (MemoryError, RuntimeError) as error:  # the device has less memory than the limit
                if not is_out_of_memory(error):
                    raise
                self._make_all_room([*keep, holding])
                self._ledger.restore(holding)
        self._resident += holding.nbytes
        self._note()

    def _note(self) -> None:
        self._peak = max(self._peak, self._resident)
        self._ledger.note(self._resident)

    def _recompute(self, recomputable: Rematerialization, holding: Allocation, keep: Collection[Allocation]) -> None:
        operands = recomputable.operands(holding, self._at)
        for operand in operands:
            if not operand.resident:
                self._reload(operand, [*keep, *operands, holding])
        self._room(self._estimate.allocates[holding.made_by], [*keep, *operands, holding])
        del self._holdings[holding.key]
        recomputable.recompute(holding, self._env, self._at)
        self._holdings[holding.key] = holding
        self._ledger.counts.recomputed += 1

    def _room(self, needed: int, keep: Collection[Allocation]) -> None:
        kept = {id(holding) for holding in keep}
        others = [holding for holding in self._holdings.values() if id(holding) not in kept]
        self._resident -= self._ledger.make_room(needed, self._resident, others, self._describe, self._evict)

    def _evict(self, holding: Allocation, candidate: EvictionCandidate) -> None:
        recomputable, ledger = self._recomputable, self._ledger
        if (
            recomputable is not None
            and candidate.recompute_seconds is not None
            and ledger.decider.recompute(candidate)
            and recomputable.possible(holding, self._step, self._at)
        ):
            recomputable.drop(holding, self._at)
            ledger.drop(holding)
        else:
            ledger.evict(holding)

    def _describe(self, holding: Allocation) -> EvictionCandidate:
        lifetimes, step, hints = self._lifetimes, self._step, self._hints
        nearest = min([lifetimes.next_use(place, step) for place in holding.places], default=NEVER)
        last = max([lifetimes.last_use(place, step) for place in holding.places], default=-1)
        if nearest == NEVER and (after := hints.next_use(holding)) is not None:
            nearest = lifetimes.steps + after
        since = step - last if last >= 0 else step + hints.last_use(holding)
        session = hints.of(holding) if holding.holders else self._session
        seconds = None if self._recomputable is None else self._recomputable.seconds(holding)
        return self._ledger.describe(holding, session, None if nearest == NEVER else nearest - step, since, seconds)
