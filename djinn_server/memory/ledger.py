"""Ledger of a device's memory: a table of storages, and eviction of the storage whose next use is furthest away.

Evicted storages are restored when they are used.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core import torch_private
from djinn_core.ir.values import meta_of
from djinn_core.logs import get_logger
from djinn_core.wire.messages import PRESSURE
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.process import ProcessMemory, process_memory
from djinn_server.memory.room import is_out_of_memory
from djinn_server.memory.spill import DISK, HOST, SpillExtent, SpillSpace, bytes_on_device, octets
from djinn_server.running.values import has_memory

if TYPE_CHECKING:
    from djinn_server.memory.session_memory import SessionMemory

_T = TypeVar("_T")
BATCH: Final = 64  # evict at least limit/N at once: ordering all candidates is slow
COMFORT: Final = 0.75  # share of the budget; below it programs run without a guard
SMALLEST: Final = 64 << 10  # bytes; smaller storages are not evicted
NONE, WARNING, CRITICAL = range(len(PRESSURE))  # levels of memory pressure
_WARNING: Final = 0.8  # shares of the budget
_CRITICAL: Final = 0.95
_log = get_logger("djinn.server")


class SourceBytes(Protocol):
    """A copy of a storage's bytes off the device: in a spill space, or in a weight file."""

    def unchanged(self) -> bool:
        """Return False if the copy is known to have changed."""

    def read_into(self, buffer: memoryview) -> None:
        """Read the bytes into `buffer`.

        Raises:
            OSError: the bytes have changed, or cannot be read.
        """


class CachedMemory(Protocol):
    """Results in a cache that can be dropped to free memory."""

    def nbytes(self) -> int:
        """Return the bytes of the cached results."""

    def drop(self) -> None:
        """Free the cached results."""


@attrs.define(eq=False)
class Entry:
    """Entry of the table: a storage that is evicted, has a copy, or is used by several sessions. Other storages have none.

    Attributes:
        reference: weak reference to the storage.
        nbytes: bytes of the contents, on or off the device.
        resident: True if the bytes are on the device.
        copy: valid copy of the bytes on the host, on disk, or in the weight file; None without a copy.
        sharers: number of sessions that use the storage, if it was read from a weight file.
    """

    reference: StorageWeakRef
    nbytes: int
    resident: bool = True
    copy: SourceBytes | None = None
    sharers: int = 0

    @property
    def where(self) -> str:
        """HOST or DISK if the storage was spilled there and is not on the device; else empty."""
        return self.copy.space.where if not self.resident and isinstance(self.copy, SpillExtent) else ""


@attrs.define(eq=False)
class Holding:
    """A storage, with the values that view it.

    Attributes:
        key: number of the storage.
        nbytes: bytes of the contents.
        resident: True if the bytes are on the device.
        pinned: True if the bytes must stay on the device.
        holders: handles of the values, by session.
        places: places of the values in the environment of the running program.
    """

    key: int
    storage: torch.UntypedStorage
    nbytes: int
    resident: bool
    pinned: bool = False
    holders: dict[SessionMemory, list[int]] = attrs.field(factory=dict)
    places: list[int] = attrs.field(factory=list)

    @property
    def movable(self) -> bool:
        """True if the memory may be freed and can be restored."""
        return self.resident and not self.pinned and self.nbytes >= SMALLEST and self.storage.resizable()


Holdings = dict[int, Holding]
RunUses = Callable[[Holding], tuple[int | None, int | None]]  # clocks of the last and next use by the running program


@attrs.define
class Pressure:
    """Level of memory pressure: none, warning, or critical (values were evicted).

    `entered`: how often each level was entered.
    """

    level: int = NONE
    entered: list[int] = attrs.field(factory=lambda: [0] * len(PRESSURE))

    def note(self, resident: int, away: int, budget: int) -> None:
        """Update the level: `resident` bytes are on the device, and `away` bytes were evicted."""
        share = (resident + away) / max(budget, 1)
        level = CRITICAL if away or share > _CRITICAL else WARNING if share > _WARNING else NONE
        if level != self.level:
            tell = _log.warning if level > self.level else _log.info
            tell("memory pressure", pressure=PRESSURE[level], resident=resident, away=away, budget=budget)
            self.level = level
            self.entered[level] += 1


@attrs.define
class EvictionCounters:
    """Counters of evictions.

    Attributes:
        evictions: storages whose memory was freed.
        spills: storages that were written to a spill space.
        restores: storages that were restored from a spill space.
        spilled, restored: bytes of these storages.
        dropped: storages that were freed without a spill.
        reread_bytes: bytes that were read again from weight files.
        refused: allocations that failed for lack of memory.
    """

    evictions: int = 0
    spills: int = 0
    spilled: int = 0
    restores: int = 0
    restored: int = 0
    dropped: int = 0
    reread_bytes: int = 0
    refused: int = 0


class Ledger:
    """Account of the memory that the sessions of a device use. It keeps this memory below `limit` bytes.

    A thread must hold `lock` to run ops or to change the table.

    Attributes:
        on_demand: True if eviction starts only after an op ran out of memory. Programs then run without `lock`, and
            inputs of the running program are not evicted.
        clock: number of steps (ops) that programs have run.
        delivered: keys of storages that are being copied to the host, so they must not be evicted.
        loading: thread that loads libraries, whose memory belongs to no session.
        cached: cached results, which are dropped before values are evicted; None without a cache.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        limit: int,
        spaces: Sequence[SpillSpace],
        *,
        on_demand: bool = False,
    ) -> None:
        self.on_demand, self.limit, self.spaces = on_demand, limit, spaces
        self.process = ProcessMemory(limit, None, reserve=0) if on_demand else process_memory(runtime.device, limit)
        self.clock = 0
        self.lock = threading.RLock()
        self.sessions: list[SessionMemory] = []
        self.counts = EvictionCounters()
        self.delivered: Counter[int] = Counter()
        self.peak = 0
        self.pressure = Pressure()
        self.loading: threading.Thread | None = None
        self.free_strategies: Callable[[], None] = _nothing
        self.cached: CachedMemory | None = None
        self._runtime, self._device = runtime, runtime.device
        self._is_host = runtime.device.type == "cpu"
        self._table: dict[int, Entry] = {}
        self._counted_again = 0  # bytes that sessions count more than once
        self._away = 0  # bytes that are not on the device

    # --- the table ----------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes that tensors may use: the limit, minus a reserve for temporary memory of ops."""
        return self.limit - self.process.reserve

    @property
    def comfort(self) -> int:
        """Bytes up to which programs run without a guard. The rest is left to memory that the allocator caches."""
        return int(COMFORT * self.budget)

    @property
    def evicted(self) -> int:
        """Bytes of values that are not on the device."""
        return self._away

    @property
    def all_resident(self) -> bool:
        """True if all values are on the device."""
        return not self._away

    @property
    def spilled(self) -> int:
        """Bytes in the spill spaces."""
        return sum(space.used for space in self.spaces)

    def allocated(self) -> int | None:
        """Return the bytes that the device's allocator has handed out; None on a host, where this is unknown."""
        return None if self._is_host else torch.accelerator.memory_allocated(self._device)

    def resident(self) -> int:
        """Return the bytes in use on the device. On a host, return the bytes of values; shared storages count once."""
        self._sweep()
        if (allocated := self.allocated()) is not None:
            return allocated
        held_bytes = sum([session.values.held_bytes for session in self.sessions]) - self._counted_again - self._away
        return held_bytes + self.cached.nbytes() if self.cached is not None else held_bytes

    def drop_cached(self) -> None:
        """Free cached results."""
        if self.cached is not None:
            self.cached.drop()

    def survey(self) -> Holdings:
        """Return all storages of values, by key."""
        self._sweep()
        holdings: Holdings = {}
        for session in self.sessions:
            session.uses.catch_up(session.values.table)
            for handle, value in session.values.items():
                if has_memory(value):
                    holding = self.holding_of(holdings, value)
                    holding.holders.setdefault(session, []).append(handle)
                    holding.pinned |= session.pins(handle)
        return holdings

    def holding_of(self, holdings: Holdings, tensor: torch.Tensor) -> Holding:
        """Return the `Holding` of a tensor's storage in `holdings`. Add it if it is new."""
        key = torch_private.storage_key(tensor)
        holding = holdings.get(key)
        if holding is None:
            storage, entry = tensor.untyped_storage(), self._table.get(key)
            is_away = entry is not None and not entry.resident
            nbytes = entry.nbytes if entry is not None and is_away else storage.nbytes()
            holding = holdings[key] = Holding(key, storage, nbytes, not is_away, key in self.delivered)
        return holding

    def is_evicted(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor's bytes are not on the device."""
        return bool(self._away) and self.is_away(torch_private.storage_key(tensor))

    def is_away(self, key: int) -> bool:
        """Return True if the bytes of the storage with this key are not on the device."""
        entry = self._table.get(key)
        return entry is not None and not entry.resident

    def _entry(self, key: int, storage: torch.UntypedStorage) -> Entry:
        entry = self._table.get(key)
        if entry is None:
            entry = self._table[key] = Entry(StorageWeakRef(storage), storage.nbytes())
        return entry

    def share(self, key: int, storage: torch.UntypedStorage) -> None:
        """Count one more session that uses a storage."""
        with self.lock:
            entry = self._entry(key, storage)
            self._counted_again += entry.nbytes if entry.sharers else 0
            entry.sharers += 1

    def unshare(self, key: int) -> None:
        """Note that a session no longer uses a shared storage."""
        with self.lock:
            entry = self._table[key]
            entry.sharers -= 1
            self._counted_again -= entry.nbytes if entry.sharers else 0
            self._drop_plain(key, entry)

    def shared_bytes(self) -> int:
        """Return the bytes of storages that several sessions use. Thread-safe."""
        return sum(entry.nbytes for entry in list(self._table.values()) if entry.sharers > 1)

    def reread_from(self, tensor: torch.Tensor, source: SourceBytes) -> None:
        """Note that the bytes of a tensor's read-only storage can be read again from `source`, a weight file."""
        entry = self._entry(torch_private.storage_key(tensor), tensor.untyped_storage())
        if entry.copy is None:
            entry.copy = source

    def written(self, key: int) -> None:
        """Drop the spilled copy of a storage, because a program may write into the storage.

        Storages from weight files are shared; programs write into copies of them.
        """
        entry = self._table.get(key)
        if entry is not None and entry.resident and isinstance(entry.copy, SpillExtent):
            self._free_copy(entry)
            self._drop_plain(key, entry)

    def has_copy(self, key: int) -> bool:
        """Return True if a storage has a copy off the device, so that eviction writes nothing."""
        entry = self._table.get(key)
        return entry is not None and entry.copy is not None

    def _free_copy(self, entry: Entry) -> None:
        if isinstance(entry.copy, SpillExtent):
            entry.copy.space.free(entry.copy)
        entry.copy = None

    def _drop_plain(self, key: int, entry: Entry) -> None:
        """Drop the entry of a storage that is on the device, has no copy, and is used by one session."""
        if entry.resident and entry.copy is None and not entry.sharers:
            del self._table[key]

    def _sweep(self) -> None:
        """Drop the entries of freed storages. Those that sessions still count as shared stay, with 0 bytes."""
        for key, entry in list(self._table.items()):
            if entry.reference.expired():
                self._free_copy(entry)
                self._away -= 0 if entry.resident else entry.nbytes
                entry.resident = True
                self._drop_plain(key, entry)

    # --- eviction and restoring ---------------------------------------------------------------------------------

    def evict(self, holding: Holding) -> None:
        """Free the memory of a storage. Spill its bytes first, unless they have a copy.

        Raises:
            OSError: no spill space has room for the bytes.
        """
        self.drop_cached()
        entry = self._entry(holding.key, holding.storage)
        if entry.copy is not None and not entry.copy.unchanged():
            entry.copy = None
        if entry.copy is None:
            entry.nbytes = holding.nbytes
            entry.copy = self._spill(holding.storage)
            self.counts.spills += 1
            self.counts.spilled += entry.nbytes
        self.counts.dropped += not isinstance(entry.copy, SpillExtent)
        self.counts.evictions += 1
        holding.storage.resize_(0)
        holding.resident = entry.resident = False
        self._away += entry.nbytes

    def _spill(self, storage: torch.UntypedStorage) -> SpillExtent:
        data = bytes_on_device(storage, self._device)
        if not self._is_host:
            try:
                data = self._runtime.deliver(data)
            except (RuntimeError, MemoryError) as error:
                raise OSError(f"cannot spill {storage.nbytes():,} bytes to host memory: {error}") from error
        for space in self.spaces[:-1]:
            try:
                return space.write(data)
            except OSError as error:
                _log.info("a spill space is full", where=space.where, error=str(error))
        return self.spaces[-1].write(data)

    def can_move(self, holding: Holding) -> bool:
        """Return True if a storage can be evicted.

        If its memory cannot be freed, such as that of an upload, move its values to other memory first.
        """
        if (
            holding.movable
            or not self._is_host
            or holding.nbytes < SMALLEST
            or holding.pinned
            or holding.key in self._table
        ):
            return holding.movable
        storage = holding.storage.clone()
        with torch.inference_mode():
            for session, handles in holding.holders.items():
                for value in [session.values[handle] for handle in handles]:
                    if has_memory(value):
                        meta = meta_of(value)
                        value.set_(storage, meta.offset, meta.shape, meta.stride)
        holding.storage, holding.key = storage, torch_private.number_of_storage(storage)
        return holding.movable

    def move_to_disk(self, holding: Holding) -> None:
        """Move the spilled bytes of a storage from the host to disk.

        Raises:
            OSError: the disk has no room for the bytes.
        """
        entry = self._table[holding.key]
        if entry.where == HOST and isinstance(entry.copy, SpillExtent) and entry.copy.block is not None:
            moved = self.spaces[-1].write(entry.copy.block)
            self._free_copy(entry)
            entry.copy = moved

    def restore(self, holding: Holding) -> None:
        """Restore the memory and the bytes of a storage. The caller has made room.

        Raises:
            OSError: the bytes cannot be read.
            RuntimeError: the device has no memory for the storage.
        """
        entry = self._table[holding.key]
        holding.storage.resize_(holding.nbytes)
        try:
            self._fill(holding.storage, entry)
        except BaseException:
            holding.storage.resize_(0)
            raise
        entry.resident = holding.resident = True
        self._away -= holding.nbytes
        if self.on_demand:  # programs without a guard may write into it
            self.written(holding.key)

    def _fill(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Copy the bytes of an entry into a storage of the same size.

        Raises:
            OSError: the bytes cannot be read.
        """
        copy = entry.copy
        assert copy is not None
        if self._is_host:
            copy.read_into(octets(storage))
        else:
            data = copy.block if isinstance(copy, SpillExtent) else None
            if data is None:
                data = torch.empty(entry.nbytes, dtype=torch.uint8)
                copy.read_into(octets(data.untyped_storage()))
            self._runtime.overwrite(bytes_on_device(storage, self._device), data)
        if isinstance(copy, SpillExtent):
            self.counts.restores += 1
            self.counts.restored += entry.nbytes
        else:
            self.counts.reread_bytes += entry.nbytes

    def copy_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return a copy of a value's storage.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
            OSError: the storage was evicted, and its bytes cannot be read.
        """
        with self.lock:
            holding = self.holding_of({}, tensor)
            self.admit(holding.nbytes)
            copy = self.with_room(lambda: torch.UntypedStorage(holding.nbytes, device=self._device))
            entry = self._table.get(holding.key)
            if entry is not None and not entry.resident:  # perhaps evicted just now to make room
                self._fill(copy, entry)
            else:
                copy.copy_(tensor.untyped_storage())
            return copy

    def steps_until_use(self, holding: Holding, now: int, run_uses: RunUses | None = None) -> int:
        """Return the predicted number of steps (ops) until the next use of a storage, for Belady's rule.

        `run_uses` returns the uses by the running program. A later use is predicted after as many steps as last time, or after
        10,000 steps the first time. If no use is predicted, the result is the number of steps since the last use.
        """
        uses = list(holding.holders.items())
        last, ahead = run_uses(holding) if run_uses is not None else (None, None)
        if last is None:
            last = max([session.uses.last(handles, now) for session, handles in uses], default=now)
        if ahead is None:
            predictions = [session.uses.next(handles, now) for session, handles in uses]
            ahead = min([clock for clock in predictions if clock is not None], default=None)
        return max(0, now - last) if ahead is None else ahead - now

    def make_room(
        self, wanted: int, resident: int, holdings: Iterable[Holding], now: int, run_uses: RunUses | None = None
    ) -> int:
        """Evict until `wanted` more bytes fit beside `resident` bytes. Return the number of freed bytes.

        After a spill space is full, only storages with a copy are evicted.
        """
        if resident + wanted <= self.budget:
            return 0
        self.free_strategies()
        without = min(resident, self.allocated() or resident)
        excess = without + wanted - self.budget
        if excess <= 0:
            return resident - without
        resident, graphs = without, resident - without
        excess, freed = max(excess, min(self.limit // BATCH, resident)), 0
        # With equal keys, evict the newest first: weights are used in the order of their uploads.
        movable, is_full = [holding for holding in holdings if holding.movable][::-1], False
        keys = [self.steps_until_use(holding, now, run_uses) for holding in movable]
        for position in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
            if freed >= excess:
                break
            if is_full and not self.has_copy(movable[position].key):
                continue
            try:
                self.evict(movable[position])
            except OSError as error:
                _log.warning("bytes cannot be spilled", bytes=movable[position].nbytes, error=str(error))
                is_full = True
                continue
            freed += movable[position].nbytes
        return graphs + freed

    # --- outside of runs ----------------------------------------------------------------------------------------

    def admit(self, nbytes: int) -> None:
        """Make room for a new value of `nbytes` bytes that no program computes, such as an upload.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self.on_demand:
            return
        resident = self.resident()
        if resident + nbytes > self.budget:
            self.drop_cached()
            resident = self.resident()
        if resident + nbytes > self.budget:
            holdings = self.survey()
            if self._is_host:
                resident = resident_bytes(holdings.values())
            resident -= self.make_room(nbytes, resident, holdings.values(), self.clock)
        if resident + nbytes > self.limit:
            self.counts.refused += 1
            raise torch.OutOfMemoryError(self.refusal(nbytes, resident))
        self.process.trim_before(nbytes)
        self.note(resident + nbytes)
        self.pressure.note(resident + nbytes, self._away, self.budget)

    def reload(self, tensor: torch.Tensor) -> None:
        """Restore the bytes of a value, if they were evicted.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self.is_evicted(tensor):
            holding = self.holding_of({}, tensor)
            self.admit(holding.nbytes)
            self.with_room(lambda: self.restore(holding))

    def with_room(self, allocate: Callable[[], _T]) -> _T:
        """Return the result of `allocate`. If it runs out of memory, evict all values and call it again.

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
            self.drop_cached()
            self.evict_everything(self.survey().values(), self.clock)
            return allocate()

    def evict_everything(self, holdings: Collection[Holding], now: int) -> int:
        """Evict all movable storages, and free the allocator's cache. Return the number of freed bytes."""
        freed = self.make_room(self.budget, resident_bytes(holdings), holdings, now)
        self._runtime.relieve()
        return freed

    def refusal(self, wanted: int, resident: int) -> str:
        """Return an out-of-memory message with the requested bytes, the resident bytes, and the bytes of each session."""
        shares = ", ".join(f"{session.values.held_bytes:,}" for session in self.sessions if session.values.held_bytes)
        return (
            f"{wanted:,} bytes do not fit: this executor may use {self.limit:,} bytes, {self.process.reserve:,} of them are reserved for temporary memory of ops, and {resident:,} bytes cannot be evicted (bytes by session: {shares or 'none'}). "
            "Free tensors, use smaller batches, or start the executor with a higher limit (memory_gib, or "
            "`djinn serve --memory-gib`)"
        )

    # --- figures ------------------------------------------------------------------------------------------------

    def note(self, resident: int) -> None:
        """Update the peak: `resident` bytes are on the device now."""
        self.peak = max(self.peak, resident)

    def relax(self) -> None:
        """Update the pressure level after a session has ended."""
        self.pressure.note(self.resident(), self._away, self.budget)

    def measure(self, resident: int) -> None:
        """Update the figures of the process while tensors take `resident` bytes."""
        self.pressure.note(resident, self._away, self.budget)
        if self.loading is not None:
            self.loading.join()
            self.loading = None
        self.process.measure(resident)

    def restart_peak(self) -> None:
        """Reset the peaks."""
        self.peak = self.process.peak = 0

    def evicted_to(self, holdings: Iterable[Holding]) -> dict[str, int]:
        """Return the bytes of evicted storages by place: HOST, or DISK, which includes weight files."""
        evicted: Counter[str] = Counter()
        for holding in holdings:
            if not holding.resident:
                entry = self._table.get(holding.key)
                evicted[(entry.where if entry is not None else "") or DISK] += holding.nbytes
        return dict(evicted)

    def figures(self) -> dict[str, int]:
        """Return the limit, peak, present and evicted bytes, and the counts of evictions."""
        return {
            "memory_limit": 0 if self.on_demand else self.limit,
            "memory_reserve": self.process.reserve,
            "memory_pressure": self.pressure.level,
            "memory_run_peak": self.peak,
            "process_peak": self.process.peak,
            "memory_away": self._away,
            "spill_bytes": self.spilled,
            "evictions": self.counts.evictions,
            "spilled_bytes": self.counts.spilled,
            "restored_bytes": self.counts.restored,
            "reread_bytes": self.counts.reread_bytes,
            "memory_shared": self.shared_bytes(),
            "refused": self.counts.refused,
        }


def _nothing() -> None:
    """Do nothing: no recorded graphs exist."""


def resident_bytes(holdings: Iterable[Holding]) -> int:
    """Return the bytes of storages that are on the device."""
    return sum(holding.nbytes for holding in holdings if holding.resident)
