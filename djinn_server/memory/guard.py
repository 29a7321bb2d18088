"""Guard of a run when memory is short. Before each step, it restores the operands and frees memory for the results."""

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

MEASUREMENTS: Final = 64  # the process is measured after each limit / MEASUREMENTS allocated bytes
MIN_TRIMMED: Final = 256 << 10  # bytes of an allocation before which the allocator returns freed memory


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

        Args:
            ledger: the device's memory ledger.
            session: the session that runs the template.
            template: the compiled template.
            memory: memory figures of the template. The run fills in missing figures.
            outputs: handles of the template's outputs.
        """
        self.lock = ledger.lock
        self._ledger, self._session, self._memory, self._outputs = ledger, session, memory, outputs
        self._consumed = frozenset(template.consumed)
        self._lifetimes = memory.lifetimes
        self._start_clock = ledger.clock
        self._step = 0
        self._relieved_step = -1  # number of the step for which all values were evicted
        self._is_first = UNKNOWN in memory.allocates  # the first run loads libraries, whose memory belongs to no op
        self._unmeasured_bytes = 0  # bytes allocated since the last measurement
        self._has_begun = False
        # Storages are identified by their keys.
        self._places: dict[int, int] = {}  # storage of the value at each place
        self._views: Counter[int] = Counter()  # number of places that view each storage
        self._sizes: dict[int, int] = {}  # bytes of each storage
        self._freed_on_release: dict[int, int] = {}  # bytes that are freed after a storage's last place is released
        self._bytes_at_start = self._bytes = self._peak = ledger.resident()

    def end(self, *, complete: bool) -> None:
        """Record the run's memory use for later runs. `complete`: True if no step failed and the run was not cancelled."""
        if complete:
            self._memory.peak = max(0, self._peak - self._bytes_at_start)
        if not self._is_first:
            self._ledger.process.end_run(self._peak)

    def before(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Restore the operands of a step, and free memory for its results.

        Raises:
            torch.OutOfMemoryError: the step and its operands do not fit.
            OSError: the bytes of an operand cannot be read.
        """
        self._step = index
        ledger = self._ledger
        if not self._has_begun:
            self._begin(env)
        operands = [value for place in step.reads if has_memory(value := env[place])]
        keep = {torch_private.storage_key(value) for value in operands}
        for value in operands:
            if ledger.is_evicted(value):
                self._restore(ledger.holding_of({}, value), keep, env)
        needed_bytes = self._bytes_needed(index, step, env)
        if self._resident() + needed_bytes > ledger.budget:
            self._make_room(needed_bytes, keep, env)
            if self._resident() + needed_bytes > ledger.limit:
                needed_bytes = self._memory.allocates[index] = bytes_of_step(
                    step, env
                )  # perhaps less than in earlier runs
                if self._resident() + needed_bytes > ledger.limit:
                    raise self._refusal(needed_bytes)
        if needed_bytes >= MIN_TRIMMED:
            ledger.process.trim_before(needed_bytes)
        self._update_peak(self._resident() + needed_bytes)
        for place in step.writes:
            if has_memory(value := env[place]):
                ledger.invalidate_copy(torch_private.storage_key(value))

    def after(self, index: int, step: CompiledStep, env: Environment) -> None:
        """Count the memory of a step's results, and of the values that it released."""
        new_bytes = 0
        for _, place in step.makes:
            if has_memory(value := env[place]):
                new_bytes += self._add_result(place, value)
        for place in step.writes:
            if has_memory(value := env[place]) and (key := torch_private.storage_key(value)) in self._sizes:
                growth = value.untyped_storage().nbytes() - self._sizes[key]
                self._sizes[key] += growth
                self._freed_on_release[key] += growth
                self._bytes += growth
        for place in step.release:
            self._release(place)
        self._memory.allocates[index] = max(self._memory.allocates[index], new_bytes)
        self._update_peak(self._resident())
        self._unmeasured_bytes += new_bytes
        if self._unmeasured_bytes > self._ledger.limit // MEASUREMENTS and not self._is_first:
            self._ledger.measure(self._resident())
            self._unmeasured_bytes = 0

    def relieve(self, index: int, step: CompiledStep, env: Environment) -> bool:
        """Evict all values except the operands of a step that ran out of memory.

        Return True if the step may be retried. It may not if it writes into an operand, or if this is its second failure.
        """
        if self._relieved_step == index:
            return False
        self._relieved_step = self._step = index
        with self.lock:
            self._ledger.drop_cache()
            keep = {torch_private.storage_key(value) for place in step.reads if has_memory(value := env[place])}
            self._bytes -= self._ledger.evict_everything(
                self._evictable(keep, self._survey(env)), self._start_clock + index
            )
        return not step.writes

    def _bytes_needed(self, index: int, step: CompiledStep, env: Environment) -> int:
        if self._ledger.on_demand:
            return 0
        if self._memory.allocates[index] == UNKNOWN:
            self._memory.allocates[index] = bytes_of_step(step, env)
        return self._memory.allocates[index]

    def _resident(self) -> int:
        allocated = self._ledger.allocated()
        return self._bytes if allocated is None else allocated

    def _update_peak(self, resident: int) -> None:
        self._peak = max(self._peak, resident)
        self._ledger.note(resident)

    def _begin(self, env: Environment) -> None:
        """Count the values before the first step. The session keeps unconsumed inputs: releasing them frees nothing."""
        self._has_begun = True
        for place in range(self._lifetimes.first_input, len(env)):
            if has_memory(value := env[place]):
                key = self._add_view(place, value)
                is_input = place not in self._lifetimes.made_by
                self._freed_on_release[key] = 0 if is_input and place not in self._consumed else self._sizes[key]

    def _add_view(self, place: int, value: torch.Tensor) -> int:
        """Add the value at a place to the views of its storage. Return the key of the storage."""
        key = torch_private.storage_key(value)
        if key not in self._sizes:
            self._freed_on_release[key] = self._sizes[key] = self._ledger.holding_of({}, value).nbytes
        self._places[place] = key
        self._views[key] += 1
        return key

    def _add_result(self, place: int, value: torch.Tensor) -> int:
        """Count the storage of a step's result. Return the bytes of the storage if it is new, else 0."""
        count = len(self._sizes)
        key = self._add_view(place, value)
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
            freed_bytes = self._freed_on_release.pop(key)
            self._bytes -= 0 if self._ledger.is_evicted_key(key) else freed_bytes

    def _restore(self, holding: Holding, keep: Collection[int], env: Environment) -> None:
        ledger = self._ledger
        if self._resident() + holding.nbytes > ledger.budget:
            self._make_room(holding.nbytes, keep, env)
        if self._resident() + holding.nbytes > ledger.limit:
            raise self._refusal(holding.nbytes)
        if holding.nbytes >= MIN_TRIMMED:
            ledger.process.trim_before(holding.nbytes)
        try:
            ledger.restore(holding)
        except (MemoryError, RuntimeError) as error:  # the device's memory is smaller than the limit
            if not is_out_of_memory(error):
                raise
            holdings = self._evictable({*keep, holding.key}, self._survey(env))
            self._bytes -= ledger.evict_everything(holdings, self._start_clock + self._step)
            ledger.restore(holding)
        self._bytes += holding.nbytes
        self._update_peak(self._resident())

    def _refusal(self, nbytes: int) -> torch.OutOfMemoryError:
        self._relieved_step = self._step  # a retry would not fit either
        self._ledger.counts.refused += 1
        return torch.OutOfMemoryError(self._ledger.refusal(nbytes, self._resident()))

    def _make_room(self, nbytes: int, keep: Collection[int], env: Environment) -> None:
        self._ledger.drop_cache()
        holdings = self._survey(env)
        self._bytes = resident_bytes(holdings.values())
        movable = self._evictable(keep, holdings)
        now = self._start_clock + self._step
        self._bytes -= self._ledger.make_room(nbytes, self._resident(), movable, now, self._run_uses)

    @staticmethod
    def _evictable(keep: Collection[int], holdings: Holdings) -> list[Holding]:
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
        """Return the clock of the last use of a storage by this run, and of its next use. None stands for no use."""
        lifetimes, places, step = self._lifetimes, holding.places, self._step
        last = max([lifetimes.last_use(place, step) for place in places], default=-1)
        ahead = min([lifetimes.next_use(place, step) for place in places], default=NEVER)
        return None if last < 0 else self._start_clock + last, None if ahead == NEVER else self._start_clock + ahead
