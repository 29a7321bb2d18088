"""Guard of a run when memory is short. Before each step, it restores the operands and makes room for the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch

from djinn_core import torch_private
from djinn_server.memory.ledger import Holding, Holdings, Ledger, resident_bytes
from djinn_server.memory.lifetimes import NEVER
from djinn_server.memory.room import is_out_of_memory
from djinn_server.memory.template_memory import UNKNOWN, TemplateMemory, bytes_of_step
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import has_memory

if TYPE_CHECKING:
    from djinn_server.memory.session_memory import SessionMemory

MEASURED: Final = 64  # measure the process after each limit/N allocated bytes
LARGE: Final = 256 << 10  # bytes; the allocator is trimmed before larger allocations


class MemoryGuard:
    """Keep one run of a template within the memory of its device.

    Attributes:
        lock: lock to hold while a step is prepared and runs.
    """

    def __init__(
        self,
        ledger: Ledger,
        session: SessionMemory,
        template: CompiledTemplate,
        memory: TemplateMemory,
        outputs: Sequence[int],
    ) -> None:
        """Prepare the guard of a run.

        `memory`: memory figures of the template. The run fills in missing figures. `outputs`: handles of the results.
        """
        self.lock = ledger.lock
        self._ledger, self._session, self._memory, self._outputs = ledger, session, memory, outputs
        self._consumed = frozenset(template.consumed)
        self._lifetimes = memory.lifetimes
        self._began = ledger.clock
        self._step = 0
        self._relieved = -1  # the step for which everything was evicted
        self._is_first = UNKNOWN in memory.allocates  # libraries are loading; their memory belongs to no op
        self._unmeasured = 0  # bytes allocated since the last measurement
        self._begun = False
        self._places: dict[int, int] = {}  # storages, by position in the environment
        self._views: Counter[int] = Counter()  # by storage: positions of its views
        self._sizes: dict[int, int] = {}  # by storage
        self._freed: dict[int, int] = {}  # by storage: bytes that are free after the last position is released
        self._before = self._bytes = self._peak = ledger.resident()

    def end(self, *, complete: bool) -> None:
        """Record the run's memory use for later runs, if the run is `complete`: no step failed."""
        if complete:
            self._memory.peak = max(0, self._peak - self._before)
        if not self._is_first:
            self._ledger.process.end_run(self._peak)

    def before(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Restore the operands of a step, and make room for its results.

        Raises:
            torch.OutOfMemoryError: the step and its operands do not fit.
            OSError: the bytes of an operand cannot be read.
        """
        self._step = index
        ledger = self._ledger
        if not self._begun:
            self._begin(env)
        operands = [value for place in step.reads if has_memory(value := env[place])]
        keep = {torch_private.storage_key(value) for value in operands}
        for value in operands:
            if ledger.is_evicted(value):
                self._restore(ledger.holding_of({}, value), keep, env)
        needed = self._needed(index, step, env)
        if self._resident() + needed > ledger.budget:
            self._make_room(needed, keep, env)
            if self._resident() + needed > ledger.limit:
                needed = self._memory.allocates[index] = bytes_of_step(step, env)  # of present operands: perhaps less
                if self._resident() + needed > ledger.limit:
                    raise self._refusal(needed)
        if needed >= LARGE:
            ledger.process.trim_before(needed)
        self._note(self._resident() + needed)
        for place in step.writes:
            if has_memory(value := env[place]):
                ledger.written(torch_private.storage_key(value))

    def after(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Count the memory of a step's results, and of the values that are released after it."""
        new_bytes = 0
        for _, place in step.makes:
            if has_memory(value := env[place]):
                new_bytes += self._count(place, value)
        for place in step.writes:
            if has_memory(value := env[place]) and (key := torch_private.storage_key(value)) in self._sizes:
                grown = value.untyped_storage().nbytes() - self._sizes[key]
                self._sizes[key] += grown
                self._freed[key] += grown
                self._bytes += grown
        for place in step.release:
            self._release(place)
        self._memory.allocates[index] = max(self._memory.allocates[index], new_bytes)
        self._note(self._resident())
        self._unmeasured += new_bytes
        if self._unmeasured > self._ledger.limit // MEASURED and not self._is_first:
            self._ledger.measure(self._resident())
            self._unmeasured = 0

    def relieve(self, index: int, step: CompiledStep, env: Environment) -> bool:
        """Evict all values except the operands of a step that ran out of memory.

        Return True if the step may be retried, because it has written nothing.
        """
        if self._relieved == index:
            return False
        self._relieved = self._step = index
        with self.lock:
            self._ledger.drop_cached()
            keep = {torch_private.storage_key(value) for place in step.reads if has_memory(value := env[place])}
            self._bytes -= self._ledger.evict_everything(self._others(keep, self._survey(env)), self._began + index)
        return not step.writes

    def _needed(self, index: int, step: CompiledStep, env: Environment) -> int:
        if self._ledger.on_demand:
            return 0
        if self._memory.allocates[index] == UNKNOWN:
            self._memory.allocates[index] = bytes_of_step(step, env)
        return self._memory.allocates[index]

    def _resident(self) -> int:
        allocated = self._ledger.allocated()
        return self._bytes if allocated is None else allocated

    def _note(self, resident: int) -> None:
        self._peak = max(self._peak, resident)
        self._ledger.note(resident)

    def _begin(self, env: Environment) -> None:
        """Count the values before the first step. The session keeps the inputs that the run does not consume."""
        self._begun = True
        for place in range(self._lifetimes.first_input, len(env)):
            if has_memory(value := env[place]):
                key = self._enter(place, value)
                is_input = place not in self._lifetimes.made_by
                self._freed[key] = 0 if is_input and place not in self._consumed else self._sizes[key]

    def _enter(self, place: int, value: torch.Tensor) -> int:
        """Note that the value at a place views a storage. Return the key of the storage."""
        key = torch_private.storage_key(value)
        if key not in self._sizes:
            self._freed[key] = self._sizes[key] = self._ledger.holding_of({}, value).nbytes
        self._places[place] = key
        self._views[key] += 1
        return key

    def _count(self, place: int, value: torch.Tensor) -> int:
        """Count the storage of a value that a step has made. Return the bytes of the storage if it is new, else 0."""
        count = len(self._sizes)
        key = self._enter(place, value)
        new = self._sizes[key] if len(self._sizes) > count else 0
        self._bytes += new
        return new

    def _release(self, place: int) -> None:
        key = self._places.pop(place, None)
        if key is None:
            return
        self._views[key] -= 1
        if not self._views[key]:
            del self._views[key], self._sizes[key]
            freed = self._freed.pop(key)
            self._bytes -= 0 if self._ledger.is_away(key) else freed

    def _restore(self, holding: Holding, keep: Collection[int], env: Environment) -> None:
        ledger = self._ledger
        if self._resident() + holding.nbytes > ledger.budget:
            self._make_room(holding.nbytes, keep, env)
        if self._resident() + holding.nbytes > ledger.limit:
            raise self._refusal(holding.nbytes)
        if holding.nbytes >= LARGE:
            ledger.process.trim_before(holding.nbytes)
        try:
            ledger.restore(holding)
        except (MemoryError, RuntimeError) as error:  # the device's memory is smaller than the limit
            if not is_out_of_memory(error):
                raise
            holdings = self._others({*keep, holding.key}, self._survey(env))
            self._bytes -= ledger.evict_everything(holdings, self._began + self._step)
            ledger.restore(holding)
        self._bytes += holding.nbytes
        self._note(self._resident())

    def _refusal(self, nbytes: int) -> torch.OutOfMemoryError:
        self._relieved = self._step  # a retry would not fit either
        self._ledger.counts.refused += 1
        return torch.OutOfMemoryError(self._ledger.refusal(nbytes, self._resident()))

    def _make_room(self, nbytes: int, keep: Collection[int], env: Environment) -> None:
        self._ledger.drop_cached()
        holdings = self._survey(env)
        self._bytes = resident_bytes(holdings.values())
        movable = self._others(keep, holdings)
        now = self._began + self._step
        self._bytes -= self._ledger.make_room(nbytes, self._resident(), movable, now, self._run_uses)

    @staticmethod
    def _others(keep: Collection[int], holdings: Holdings) -> list[Holding]:
        return [holding for key, holding in holdings.items() if key not in keep]

    def _survey(self, env: Environment) -> Holdings:
        """Return all storages of sessions and of this run, by key."""
        holdings, outputs = self._ledger.survey(), self._lifetimes.outputs
        for place in range(self._lifetimes.first_input, len(env)):
            if has_memory(value := env[place]):
                holding = self._ledger.holding_of(holdings, value)
                holding.places.append(place)
                if place in outputs:
                    holding.holders.setdefault(self._session, []).append(self._outputs[outputs[place]])
        return holdings

    def _run_uses(self, holding: Holding) -> tuple[int | None, int | None]:
        """Return the clocks at which steps of this run last used a storage and will next use it; None for none."""
        lifetimes, places, step = self._lifetimes, holding.places, self._step
        last = max([lifetimes.last_use(place, step) for place in places], default=-1)
        ahead = min([lifetimes.next_use(place, step) for place in places], default=NEVER)
        return None if last < 0 else self._began + last, None if ahead == NEVER else self._began + ahead
