"""Ledger of one device's memory under a limit: the holdings of each session, eviction, and reloading."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core import torch_private
from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, SessionHints
from djinn_core.logs import get_logger
from djinn_core.wire.messages import PRESSURE
from djinn_server.memory.allocation import Allocation, SourceBytes, StoredCopy
from djinn_server.memory.budgets import RESIDENCIES, Budgets
from djinn_server.memory.eviction import Decider, Hints, kind_of_holding
from djinn_server.memory.process import process_memory
from djinn_server.memory.room import is_out_of_memory
from djinn_server.memory.spill import HostSpill, SpillExtent, SpillSpace, octets
from djinn_server.running.values import has_memory

if TYPE_CHECKING:
    from djinn_server.memory.session_memory import SessionMemory

_T = TypeVar("_T")
Holdings = dict[int, Allocation]
Describe = Callable[[Allocation], EvictionCandidate]
Evict = Callable[[Allocation, EvictionCandidate], None]
BATCH: Final = 64  # room is made for at least the limit by this, because finding what goes takes time
STEPS: Final = 64  # in steps of the limit by this what is left grows and shrinks
RESERVE: Final = 4  # the limit by this is left to what ops need beside their results, until it is known
COMFORT: Final = 0.75  # of what tensors may take
FULL: Final = 0.95  # of the limit; a process that takes more leaves too little to what ops need
NONE, WARNING, CRITICAL = range(len(PRESSURE))  # levels of memory pressure
_WARNING: Final = 0.8  # of what tensors may take
_CRITICAL: Final = 0.95
_log = get_logger("djinn.server")


@attrs.define
class Pressure:
    """The level of memory pressure: none, a warning, or critical, which means that values were evicted.

    Attributes:
        entered: how often each level was entered.
    """

    level: int = NONE
    entered: list[int] = attrs.field(factory=lambda: [0] * len(PRESSURE))

    def note(self, resident: int, away: int, budget: int) -> None:
        """Note that `resident` bytes are in memory, and `away` bytes elsewhere for want of it."""
        share = (resident + away) / max(budget, 1)
        level = CRITICAL if away or share > _CRITICAL else WARNING if share > _WARNING else NONE
        if level != self.level:
            tell = _log.warning if level > self.level else _log.info
            tell("memory pressure", pressure=PRESSURE[level], resident=resident, away=away, budget=budget)
            self.level = level
            self.entered[level] += 1


@attrs.define
class EvictionCounters:
    """Counters of evictions and the like.

    Attributes:
        evictions: values whose memory was taken. spills, restores: values that were written elsewhere, and read back.
        spilled, restored: bytes of these.
        dropped, reread: values whose memory was taken because they can be read again from where they came, and that were.
        reread_bytes: bytes of the latter.
        recomputed: values that were computed again. refused: allocations for which there was no room.
    """

    evictions: int = 0
    spills: int = 0
    spilled: int = 0
    restores: int = 0
    restored: int = 0
    dropped: int = 0
    reread: int = 0
    reread_bytes: int = 0
    recomputed: int = 0
    refused: int = 0


class Ledger:
    """Tracks the memory that the sessions of a device hold, and keeps it below `limit` bytes.

    A thread that runs ops or changes holdings has `lock`.

    Attributes:
        on_demand: True if nothing is evicted before an op runs out of memory. Programs then run without `lock`, and the inputs of
            those that run are not evicted.
        relieve: frees memory of the device that no tensor uses.
        delivered: storages that are copied to the host beside programs, which must stay where they are, by key.
    """

    def __init__(
        self,
        limit: int,
        device: torch.device,
        space: SpillSpace,
        decider: Decider | None = None,
        *,
        on_demand: bool = False,
        relieve: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_demand, self.relieve = on_demand, relieve
        self.limit = limit
        self.device = device
        self.space = space
        self.decider = decider or Decider()
        self.steps = 0  # that programs have run here
        self.lock = threading.RLock()
        self.sessions: list[SessionMemory] = []
        self.counts = EvictionCounters()
        self.delivered: Counter[int] = Counter()
        self.budgets = Budgets()
        self.peak = 0
        self.reserve = 0 if on_demand else limit // RESERVE
        self.process = None if on_demand else process_memory(device)
        self.pressure = Pressure()
        self.loading: threading.Thread | None = None  # loads libraries, whose memory is no session's
        self._copies: dict[int, StoredCopy] = {}
        self._shared: dict[int, list[int]] = {}  # by storage: how many sessions count it, and its bytes
        self._counted_again = 0  # bytes of shared storages that sessions count beyond the first time
        self._away = 0  # bytes of storages whose memory was taken

    # --- what is held -------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes that tensors may take: the limit without what is left to what ops need beside them."""
        return self.limit - self.reserve

    @property
    def comfort(self) -> int:
        """Bytes up to which programs run as they are: the allocator keeps some of what is freed."""
        return int(COMFORT * self.budget)

    def resident(self) -> int:
        """Bytes that all sessions have in memory, in values, shared ones counted once, and in what has run ahead."""
        self._sweep()
        return sum([one.values.held + one.ahead for one in self.sessions]) - self._counted_again - self._away

    def without_runs_ahead(self) -> int:
        """Free what sessions hold of programs that have run before their submissions came; as `resident` after it."""
        for session in self.sessions:
            session.give_way()
        return self.resident()

    def share(self, key: int, nbytes: int) -> None:
        """A session counts a storage among its own that others may count as well."""
        with self.lock:
            found = self._shared.setdefault(key, [0, nbytes])
            self._counted_again += found[1] if found[0] else 0
            found[0] += 1

    def unshare(self, key: int) -> None:
        """A session does not count a storage that it shared any more."""
        with self.lock:
            found = self._shared[key]
            found[0] -= 1
            if found[0]:
                self._counted_again -= found[1]
            else:
                del self._shared[key]

    def survey(self) -> Holdings:
        """All memory that values look into, by its key."""
        self._sweep()
        found: Holdings = {}
        for session in self.sessions:
            for handle, value in session.values.items():
                if has_memory(value):
                    holding = self.look(found, value)
                    holding.holders.setdefault(session, []).append(handle)
                    holding.pinned |= session.pins(handle)
        return found

    def look(self, holdings: Holdings, tensor: torch.Tensor) -> Allocation:
        """The holding of a tensor's memory, a new one where there is none."""
        key = torch_private.storage_key(tensor)
        holding = holdings.get(key)
        if holding is None:
            storage, copy = tensor.untyped_storage(), self._copies.get(key)
            if copy is None or copy.resident:
                holding = Allocation(key, storage, storage.nbytes())
            else:
                holding = Allocation(key, storage, copy.nbytes, resident=False)
            holding.pinned = key in self.delivered
            holdings[key] = holding
        return holding

    def is_evicted(self, tensor: torch.Tensor) -> bool:
        """True if a tensor's memory was evicted."""
        copy = self._copies.get(torch_private.storage_key(tensor)) if self._copies else None
        return copy is not None and not copy.resident

    def sizes(self) -> dict[int, int]:
        """Bytes of what was taken, by key."""
        return {key: copy.nbytes for key, copy in self._copies.items() if not copy.resident}

    def shared_bytes(self) -> int:
        """Bytes of storages that sessions count more than once; for any thread."""
        return sum(nbytes for count, nbytes in list(self._shared.values()) if count > 1)

    @property
    def all_resident(self) -> bool:
        """True if all values are in memory, and nothing of them lies elsewhere as well that would have to change with them."""
        return not self._away and not self.space.used

    @property
    def evicted(self) -> int:
        """Bytes of values whose memory was taken."""
        return self._away

    def note(self, resident: int) -> None:
        """Note that `resident` bytes are in memory now."""
        self.peak = max(self.peak, resident)

    def restart_peak(self) -> None:
        """Count the peaks again."""
        self.peak = 0
        if self.process is not None:
            self.process.peak = 0

    def figures(self) -> dict[str, int]:
        """Bytes: the limit, what is held at most and now, what lies elsewhere; and what was done so far."""
        return {
            "memory_limit": 0 if self.on_demand else self.limit,
            "memory_reserve": self.reserve,
            "memory_pressure": self.pressure.level,
            "memory_run_peak": self.peak,
            "process_peak": self.process.peak if self.process is not None else 0,
            "memory_away": self._away,
            "spill_bytes": self.space.used,
            "evictions": self.counts.evictions,
            "spilled_bytes": self.counts.spilled,
            "restored_bytes": self.counts.restored,
            "reread_bytes": self.counts.reread_bytes,
            "memory_shared": self.shared_bytes(),
            "remade": self.counts.recomputed,
            "refused": self.counts.refused,
        }

    def expect(self, nbytes: int) -> None:
        """Prepare for `nbytes` more: what the allocator keeps must not come on top of them."""
        if self.process is not None and self.process.beyond() + nbytes > self.limit - self.reserve // 2:
            self.process.trim()

    def relax(self) -> None:
        """Note the pressure that is left after a session has ended: the next program, which would note it, may be far away."""
        self.pressure.note(self.resident(), self._away, self.budget)

    def measure(self, resident: int) -> None:
        """Measure the process while tensors take `resident` bytes: what it takes beyond them becomes the reserve."""
        self.pressure.note(resident, self._away, self.budget)
        process = self.process
        if process is None:
            return
        if self.loading is not None:
            self.loading.join()
            self.loading = None
        process.begin(resident)
        if process.beyond() <= FULL * self.limit:
            return
        process.trim()
        self._leave(process.beyond() - resident)

    def begin_run(self) -> None:
        """Begin a run whose memory is measured."""
        if self.process is not None:
            self.process.peak_beyond()  # for what came between runs
            self.process.restart_peak()

    def end_run(self, peak: int) -> None:
        """End the run; its tensors took at most `peak` bytes. What ops took beside them becomes the reserve of the next run."""
        found = self.process.peak_beyond() if self.process is not None else None
        if found is None:
            return
        if found > FULL * self.limit:
            self._leave(self.reserve + found - int(FULL * self.limit))
        elif peak > FULL * self.budget and found < FULL**2 * self.limit:
            self.reserve = max(self.reserve - self.limit // STEPS, self.limit // STEPS)

    def _leave(self, beside: int) -> None:
        """Leave at least `beside` bytes, and some, to what ops take beside their results."""
        self.reserve = min(max(self.reserve, beside + self.limit // STEPS), self.limit // 2)

    # --- what goes, and comes back ------------------------------------------------------------------------------

    def reread_from(self, tensor: torch.Tensor, source: SourceBytes) -> None:
        """The memory of a tensor, which no program will write into, has bytes that can be read again."""
        key = torch_private.storage_key(tensor)
        if key not in self._copies:
            storage = tensor.untyped_storage()
            self._copies[key] = StoredCopy(StorageWeakRef(storage), storage.nbytes(), source, resident=True)

    def evict(self, holding: Allocation) -> None:
        """Free the memory of a holding, after its bytes were spilled.

        Raises:
            OSError: they cannot be kept.
        """
        copy = self._copies.get(holding.key)
        if copy is not None and not isinstance(copy.place, SpillExtent) and not copy.place.unchanged():
            copy = None
        if copy is None:
            slot = self.space.write(holding.storage)
            reference = StorageWeakRef(holding.storage)
            copy = self._copies[holding.key] = StoredCopy(reference, slot.size, slot, resident=True)
            self.counts.spills += 1
            self.counts.spilled += slot.size
        self.counts.dropped += not isinstance(copy.place, SpillExtent)
        self.drop(holding)
        copy.resident = False
        self._away += copy.nbytes

    def drop(self, holding: Allocation) -> None:
        """Free the memory of a holding whose bytes can be read again or recomputed."""
        for session in self.sessions:
            session.give_way()  # what it runs ahead may use it
        holding.storage.resize_(0)
        holding.resident = False
        self.counts.evictions += 1

    def restore(self, holding: Allocation) -> None:
        """Give a holding its memory and bytes back; there is room.

        Raises:
            OSError: they cannot be read.
            RuntimeError: the device has no memory after all.
        """
        copy = self._copies[holding.key]
        holding.storage.resize_(holding.nbytes)
        try:
            self._fill(holding.storage, copy)
        except BaseException:
            holding.storage.resize_(0)
            raise
        copy.resident = holding.resident = True
        self._away -= holding.nbytes
        if self.on_demand:  # so that programs run as they are again
            self.written(holding.key)

    def _fill(self, storage: torch.UntypedStorage, copy: StoredCopy) -> None:
        """Put the bytes of a copy into a storage of the same size.

        Raises:
            OSError: they cannot be read.
        """
        if isinstance(copy.place, SpillExtent):
            self.space.read(copy.place, storage)
            self.counts.restores += 1
            self.counts.restored += copy.nbytes
            return
        if isinstance(self.space, HostSpill):
            data = torch.empty(copy.nbytes, dtype=torch.uint8)
            copy.place.read_into(data.numpy().data)
            self.space.overwrite(storage, data)
        else:
            copy.place.read_into(octets(storage))
        self.counts.reread += 1
        self.counts.reread_bytes += copy.nbytes

    def written(self, key: int) -> None:
        """A storage in memory may be written into: what was spilled of it is no longer what it contains.

        What is read again from where it came is memory that sessions share: they write into copies of it.
        """
        copy = self._copies.get(key)
        if copy is not None and copy.resident and isinstance(copy.place, SpillExtent):
            del self._copies[key]
            self.space.free(copy.place)

    def copy_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """A copy of a value's memory.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
            OSError: the memory was evicted, and its bytes cannot be read.
        """
        with self.lock:
            holding = self.look({}, tensor)
            self.admit(holding.nbytes)
            made = self.with_room(lambda: torch.UntypedStorage(holding.nbytes, device=self.device))
            copy = self._copies.get(holding.key)
            if copy is not None and not copy.resident:  # perhaps only now, to make room
                self._fill(made, copy)
            else:
                made.copy_(tensor.untyped_storage())
            return made

    def is_kept(self, holding: Allocation) -> bool:
        """True if the bytes lie elsewhere already, so that nothing need be written."""
        return holding.key in self._copies

    def hints(self, holdings: Holdings) -> Hints:
        """Hints about the holdings that outlive the running program, if there is one."""
        for session in self.sessions:
            session.catch_up()
        held = holdings.values()
        return Hints(self.sessions, held, time.monotonic(), self.steps, self.budgets, self.budget)

    def describe(
        self,
        holding: Allocation,
        session: SessionHints,
        next_use: int | None,
        last_use: int,
        recompute_seconds: float | None = None,
    ) -> EvictionCandidate:
        """A holding as memory policies see it."""
        spilled = self.is_kept(holding)
        seconds = holding.nbytes / self.space.read_speed
        if not spilled:
            seconds += holding.nbytes / self.space.write_speed
        return EvictionCandidate(
            holding.nbytes,
            RESIDENCIES[kind_of_holding(holding)],
            session,
            bool(holding.holders),
            next_use,
            last_use,
            spilled,
            seconds,
            recompute_seconds,
            max(itertools.chain.from_iterable(holding.holders.values()), default=0),
            max(len(holding.holders), 1),
        )

    def between_programs(self, hints: Hints) -> Describe:
        """The description of holdings while no program runs."""
        return lambda holding: self.describe(
            holding, hints.of(holding), hints.next_use(holding), hints.last_use(holding)
        )

    def make_room(
        self,
        wanted: int,
        resident: int,
        holdings: Iterable[Allocation],
        describe: Describe,
        evict: Evict | None = None,
    ) -> int:
        """Evict of `holdings` until `wanted` bytes fit beside `resident`, or none is left; returns the bytes that were freed."""
        excess = resident + wanted - self.budget
        if excess <= 0:
            return 0
        excess = max(excess, min(self.limit // BATCH, resident))
        taken = 0
        movable = [holding for holding in holdings if holding.movable]
        candidates = tuple([describe(holding) for holding in movable])
        for position in self.decider.order(EvictionContext(candidates, excess, resident, self.budget)):
            if taken >= excess:
                break
            holding = movable[position]
            try:
                if evict is None:
                    self.evict(holding)
                else:
                    evict(holding, candidates[position])
            except OSError as error:
                _log.warning("bytes cannot be spilled", bytes=holding.nbytes, error=str(error))
                break
            taken += holding.nbytes
        return taken

    def forget(self, key: int) -> None:
        """Free the spilled copy of a storage that is gone."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            if isinstance(copy.place, SpillExtent):
                self.space.free(copy.place)
            if not copy.resident:
                self._away -= copy.nbytes

    def _sweep(self) -> None:
        """Free the spilled copies of storages that are gone."""
        for key, copy in list(self._copies.items()):
            if copy.reference.expired():
                self.forget(key)

    # --- outside of runs ----------------------------------------------------------------------------------------

    def admit(self, nbytes: int) -> None:
        """Make room for a new value that no program makes.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        if self.on_demand:
            return
        resident = self.resident()
        if resident + nbytes > self.budget:
            resident = self.without_runs_ahead()
        if resident + nbytes > self.budget:
            holdings = self.survey()
            describe = self.between_programs(self.hints(holdings))
            resident = sum(h.nbytes for h in holdings.values() if h.resident)
            resident -= self.make_room(nbytes, resident, holdings.values(), describe)
        if resident + nbytes > self.limit:
            self.counts.refused += 1
            raise torch.OutOfMemoryError(self.refusal(nbytes, resident))
        self.expect(nbytes)
        self.note(resident + nbytes)
        self.pressure.note(resident + nbytes, self._away, self.budget)

    def reload(self, tensor: torch.Tensor) -> None:
        """Reload the memory of a value, if it was evicted.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        if self.is_evicted(tensor):
            holding = self.look({}, tensor)
            self.admit(holding.nbytes)
            self.with_room(lambda: self.restore(holding))

    def with_room(self, allocate: Callable[[], _T]) -> _T:
        """Return what `allocate` returns. If it runs out of memory, evict what can be evicted, and call it once more.

        Raises:
            RuntimeError: there is not enough memory.
        """
        try:
            return allocate()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _log.info("memory ran out: values are evicted", error=str(error))
        with self.lock:
            holdings = self.survey()
            resident = sum(h.nbytes for h in holdings.values() if h.resident)
            self.make_room(self.budget, resident, holdings.values(), self.between_programs(self.hints(holdings)))
            self.relieve()
            return allocate()

    def refusal(self, wanted: int, resident: int) -> str:
        """An out-of-memory message: the bytes requested, the bytes resident, and the share of each session."""
        held = [(session.values.held, session) for session in self.sessions]
        shares = ", ".join(f"{session.name or 'a session'} {nbytes:,}" for nbytes, session in held if nbytes)
        return (
            f"{wanted:,} bytes do not fit: this executor may hold {self.limit:,} bytes, {self.reserve:,} of them are left to "
            f"what ops need beside their results, and {resident:,} cannot make room (bytes by session: {shares or 'none'}). "
            "Free tensors, use smaller batches, or start the executor with a higher limit (memory_gib, or "
            "`djinn serve --memory-gib`)"
        )
