"""Ledger of a device's memory: a table of storages, and eviction of the storages whose next use is furthest away.

Evicted storages are restored when they are used. A storage's key is the number that PyTorch gives it (`storage_key`).
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
BATCHES: Final = 64  # at least limit / BATCHES bytes are evicted at once, because ordering all candidates is slow
UNGUARDED_SHARE: Final = 0.75  # fraction of the budget below which programs run without a guard
MIN_EVICTED: Final = 64 << 10  # bytes of the smallest storage that is evicted
NONE, WARNING, CRITICAL = range(len(PRESSURE))  # levels of memory pressure
_WARNING: Final = 0.8  # fractions of the budget above which the pressure has a level
_CRITICAL: Final = 0.95
_log = get_logger("djinn.server")


class SourceBytes(Protocol):
    """A copy of a storage's bytes off the device: in a spill space, or in a weight file."""

    def unchanged(self) -> bool:
        """Return False if the copy has changed since it was made."""

    def read_into(self, buffer: memoryview) -> None:
        """Read all bytes into `buffer`, which has the size of the copy.

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
    """Entry of the table: a storage that is evicted, has a copy, or was read from a weight file.

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
    def location(self) -> str:
        """`HOST` or `DISK` if the storage was spilled and is not on the device; else empty."""
        return self.copy.space.location if not self.resident and isinstance(self.copy, SpillExtent) else ""


@attrs.define(eq=False)
class Holding:
    """A storage, with the values that view it.

    Attributes:
        key: key of the storage.
        nbytes: bytes of the contents, on or off the device.
        resident: True if the bytes are on the device.
        fixed: True if the bytes must stay on the device.
        holders: handles of the values, by session.
        places: places of the values in the environment of the running program.
    """

    key: int
    storage: torch.UntypedStorage
    nbytes: int
    resident: bool
    fixed: bool = False
    holders: dict[SessionMemory, list[int]] = attrs.field(factory=dict)
    places: list[int] = attrs.field(factory=list)

    @property
    def movable(self) -> bool:
        """True if the memory may be freed and can be restored."""
        return self.resident and not self.fixed and self.nbytes >= MIN_EVICTED and self.storage.resizable()


Holdings = dict[int, Holding]
RunUses = Callable[[Holding], tuple[int | None, int | None]]  # clocks of the last and next use by the running program


@attrs.define
class Pressure:
    """Level of memory pressure.

    Attributes:
        level: `CRITICAL` if values are evicted or memory is nearly full, `WARNING` if less memory is used, else `NONE`.
        entry_counts: how often each level was entered.
    """

    level: int = NONE
    entry_counts: list[int] = attrs.field(factory=lambda: [0] * len(PRESSURE))

    def note(self, resident: int, away: int, budget: int) -> None:
        """Update the level, and log a change. `resident`, `away`: bytes on the device, and evicted bytes."""
        share = (resident + away) / max(budget, 1)
        level = CRITICAL if away or share > _CRITICAL else WARNING if share > _WARNING else NONE
        if level != self.level:
            tell = _log.warning if level > self.level else _log.info
            tell("memory pressure", pressure=PRESSURE[level], resident=resident, away=away, budget=budget)
            self.level = level
            self.entry_counts[level] += 1


@attrs.define
class EvictionCounters:
    """Counters of evictions.

    Attributes:
        evictions: storages whose memory was freed.
        spills, spilled: storages that were written to a spill space, and their bytes.
        restores, restored: storages that were restored from a spill space, and their bytes.
        dropped: storages that were freed without a spill, because a weight file has their bytes.
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
        limit: maximum bytes of device memory.
        spill_spaces: spill spaces, the preferred one first.
        process: meter of the process's memory.
        clock: number of steps (ops) that programs have run.
        sessions: the sessions whose values are counted.
        counts: counters of evictions.
        delivering: number of running copies to the host by storage key. These storages are not evicted.
        peak: maximum bytes on the device since `reset_peaks`.
        pressure: level of memory pressure.
        loading_thread: thread that loads libraries, whose memory belongs to no session; None after it has ended.
        free_strategies: frees device memory of run strategies, such as recorded graphs.
        cache: cached results, which are dropped before values are evicted; None without a cache.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        limit: int,
        spill_spaces: Sequence[SpillSpace],
        *,
        on_demand: bool = False,
    ) -> None:
        self.on_demand, self.limit, self.spill_spaces = on_demand, limit, spill_spaces
        self.process = ProcessMemory(limit, None, reserve=0) if on_demand else process_memory(runtime.device, limit)
        self.clock = 0
        self.lock = threading.RLock()
        self.sessions: list[SessionMemory] = []
        self.counts = EvictionCounters()
        self.delivering: Counter[int] = Counter()
        self.peak = 0
        self.pressure = Pressure()
        self.loading_thread: threading.Thread | None = None
        self.free_strategies: Callable[[], None] = _free_nothing
        self.cache: CachedMemory | None = None
        self._runtime, self._device = runtime, runtime.device
        self._is_host = runtime.device.type == "cpu"
        self._table: dict[int, Entry] = {}
        self._shared_excess = 0  # bytes that sessions count in addition to the first session
        self._evicted_bytes = 0

    # --- the table ----------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes that tensors may use: the limit, minus a reserve for temporary memory of ops."""
        return self.limit - self.process.reserve

    @property
    def unguarded_bytes(self) -> int:
        """Bytes up to which programs run without a guard. The rest of the budget is left to the allocator's cache."""
        return int(UNGUARDED_SHARE * self.budget)

    @property
    def evicted_bytes(self) -> int:
        """Bytes of values that are not on the device."""
        return self._evicted_bytes

    @property
    def all_resident(self) -> bool:
        """True if all values are on the device."""
        return not self._evicted_bytes

    @property
    def spilled(self) -> int:
        """Bytes in the spill spaces."""
        return sum(space.used for space in self.spill_spaces)

    def allocated(self) -> int | None:
        """Return the bytes that the device's allocator has allocated, or None on a CPU, where they are unknown."""
        return None if self._is_host else torch.accelerator.memory_allocated(self._device)

    def resident(self) -> int:
        """Return the bytes in use on the device.

        On a CPU, return the bytes of values and cached results. Shared storages count once.
        """
        self._sweep()
        if (allocated := self.allocated()) is not None:
            return allocated
        held_bytes = (
            sum([session.values.held_bytes for session in self.sessions]) - self._shared_excess - self._evicted_bytes
        )
        return held_bytes + self.cache.nbytes() if self.cache is not None else held_bytes

    def drop_cache(self) -> None:
        """Free all cached results."""
        if self.cache is not None:
            self.cache.drop()

    def survey(self) -> Holdings:
        """Return all storages of the sessions' values, by key."""
        self._sweep()
        holdings: Holdings = {}
        for session in self.sessions:
            session.uses.catch_up(session.values.table)
            for handle, value in session.values.items():
                if has_memory(value):
                    holding = self.holding_of(holdings, value)
                    holding.holders.setdefault(session, []).append(handle)
                    holding.fixed |= session.is_fixed(handle)
        return holdings

    def holding_of(self, holdings: Holdings, tensor: torch.Tensor) -> Holding:
        """Return the `Holding` of a tensor's storage in `holdings`. Add the storage if it is missing."""
        key = torch_private.storage_key(tensor)
        holding = holdings.get(key)
        if holding is None:
            storage, entry = tensor.untyped_storage(), self._table.get(key)
            is_evicted_key = entry is not None and not entry.resident
            nbytes = entry.nbytes if entry is not None and is_evicted_key else storage.nbytes()
            holding = holdings[key] = Holding(key, storage, nbytes, not is_evicted_key, key in self.delivering)
        return holding

    def is_evicted(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor's bytes are not on the device."""
        return bool(self._evicted_bytes) and self.is_evicted_key(torch_private.storage_key(tensor))

    def is_evicted_key(self, key: int) -> bool:
        """Return True if the bytes of the storage with this key are not on the device."""
        entry = self._table.get(key)
        return entry is not None and not entry.resident

    def _entry(self, key: int, storage: torch.UntypedStorage) -> Entry:
        entry = self._table.get(key)
        if entry is None:
            entry = self._table[key] = Entry(StorageWeakRef(storage), storage.nbytes())
        return entry

    def share(self, key: int, storage: torch.UntypedStorage) -> None:
        """Add one to the number of sessions that use a storage."""
        with self.lock:
            entry = self._entry(key, storage)
            self._shared_excess += entry.nbytes if entry.sharers else 0
            entry.sharers += 1

    def unshare(self, key: int) -> None:
        """Subtract one from the number of sessions that use a shared storage."""
        with self.lock:
            entry = self._table[key]
            entry.sharers -= 1
            self._shared_excess -= entry.nbytes if entry.sharers else 0
            self._drop_if_plain(key, entry)

    def shared_bytes(self) -> int:
        """Return the bytes of storages that several sessions use. Thread-safe."""
        return sum(entry.nbytes for entry in list(self._table.values()) if entry.sharers > 1)

    def set_source(self, tensor: torch.Tensor, source: SourceBytes) -> None:
        """Set the copy from which a tensor's storage can be restored: `source`, a part of a weight file.

        The storage must be read-only.
        """
        entry = self._entry(torch_private.storage_key(tensor), tensor.untyped_storage())
        if entry.copy is None:
            entry.copy = source

    def invalidate_copy(self, key: int) -> None:
        """Drop the spilled copy of a storage, because a program may write into the storage.

        A copy in a weight file stays, because programs write into private copies of such storages.
        """
        entry = self._table.get(key)
        if entry is not None and entry.resident and isinstance(entry.copy, SpillExtent):
            self._free_copy(entry)
            self._drop_if_plain(key, entry)

    def has_copy(self, key: int) -> bool:
        """Return True if a storage has a copy off the device, so that eviction writes nothing."""
        entry = self._table.get(key)
        return entry is not None and entry.copy is not None

    def _free_copy(self, entry: Entry) -> None:
        if isinstance(entry.copy, SpillExtent):
            entry.copy.space.free(entry.copy)
        entry.copy = None

    def _drop_if_plain(self, key: int, entry: Entry) -> None:
        """Drop the entry of a storage if the storage is on the device, has no copy, and was not read from a file."""
        if entry.resident and entry.copy is None and not entry.sharers:
            del self._table[key]

    def _sweep(self) -> None:
        """Drop the entries of freed storages. Entries that sessions still count as shared stay."""
        for key, entry in list(self._table.items()):
            if entry.reference.expired():
                self._free_copy(entry)
                self._evicted_bytes -= 0 if entry.resident else entry.nbytes
                entry.resident = True
                self._drop_if_plain(key, entry)

    # --- eviction and restoring ---------------------------------------------------------------------------------

    def evict(self, holding: Holding) -> None:
        """Free the memory of a storage. Spill its bytes first, unless they have a copy.

        Raises:
            OSError: the spill spaces are full.
        """
        self.drop_cache()
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
        self._evicted_bytes += entry.nbytes

    def _spill(self, storage: torch.UntypedStorage) -> SpillExtent:
        data = bytes_on_device(storage, self._device)
        if not self._is_host:
            try:
                data = self._runtime.deliver(data)
            except (RuntimeError, MemoryError) as error:
                raise OSError(f"cannot spill {storage.nbytes():,} bytes to host memory: {error}") from error
        for space in self.spill_spaces[:-1]:
            try:
                return space.write(data)
            except OSError as error:
                _log.info("a spill space is full", location=space.location, error=str(error))
        return self.spill_spaces[-1].write(data)

    def make_movable(self, holding: Holding) -> bool:
        """Return True if a storage can be evicted.

        If the storage's memory cannot be freed, as for an upload, first move its values to memory that can be freed.
        """
        if (
            holding.movable
            or not self._is_host
            or holding.nbytes < MIN_EVICTED
            or holding.fixed
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
            OSError: the disk is full.
        """
        entry = self._table[holding.key]
        if entry.location == HOST and isinstance(entry.copy, SpillExtent) and entry.copy.block is not None:
            disk_copy = self.spill_spaces[-1].write(entry.copy.block)
            self._free_copy(entry)
            entry.copy = disk_copy

    def restore(self, holding: Holding) -> None:
        """Restore the memory and the bytes of a storage. The caller must have freed enough memory.

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
        self._evicted_bytes -= holding.nbytes
        if self.on_demand:  # programs without a guard may write into the storage
            self.invalidate_copy(holding.key)

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

    def copy_storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
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
            if entry is not None and not entry.resident:  # perhaps evicted by the calls above
                self._fill(copy, entry)
            else:
                copy.copy_(tensor.untyped_storage())
            return copy

    def steps_until_use(self, holding: Holding, now: int, run_uses: RunUses | None = None) -> int:
        """Return the predicted number of steps (ops) until the next use of a storage, for Belady's rule.

        The uses by the running program are exact (`run_uses`). Later uses are predicted by `UseHistory`. If no use is
        predicted, return the number of steps since the last use. `now`: the present clock.
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
        self, needed_bytes: int, resident: int, holdings: Iterable[Holding], now: int, run_uses: RunUses | None = None
    ) -> int:
        """Evict storages until `needed_bytes` more bytes fit into the budget. Return the number of freed bytes.

        After the spill spaces are full, only storages with a copy are evicted.

        Args:
            needed_bytes: bytes that will be allocated.
            resident: bytes that are on the device.
            holdings: storages that may be evicted.
            now: the present clock.
            run_uses: as in `steps_until_use`.
        """
        if resident + needed_bytes <= self.budget:
            return 0
        self.free_strategies()
        resident_now = min(resident, self.allocated() or resident)
        excess = resident_now + needed_bytes - self.budget
        if excess <= 0:
            return resident - resident_now
        resident, freed_by_strategies = resident_now, resident - resident_now
        excess, freed_bytes = max(excess, min(self.limit // BATCHES, resident)), 0
        # Of equal keys, the newest storage is evicted first, because weights are used in the order of their uploads.
        movable, is_full = [holding for holding in holdings if holding.movable][::-1], False
        keys = [self.steps_until_use(holding, now, run_uses) for holding in movable]
        for position in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
            if freed_bytes >= excess:
                break
            if is_full and not self.has_copy(movable[position].key):
                continue
            try:
                self.evict(movable[position])
            except OSError as error:
                _log.warning("a storage cannot be spilled", bytes=movable[position].nbytes, error=str(error))
                is_full = True
                continue
            freed_bytes += movable[position].nbytes
        return freed_by_strategies + freed_bytes

    # --- outside of runs ----------------------------------------------------------------------------------------

    def admit(self, nbytes: int) -> None:
        """Free memory for a new value of `nbytes` bytes that no program computes, such as an upload.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
        """
        if self.on_demand:
            return
        resident = self.resident()
        if resident + nbytes > self.budget:
            self.drop_cache()
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
        self.pressure.note(resident + nbytes, self._evicted_bytes, self.budget)

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
            self.drop_cache()
            self.evict_everything(self.survey().values(), self.clock)
            return allocate()

    def evict_everything(self, holdings: Collection[Holding], now: int) -> int:
        """Evict all movable storages, and free the allocator's cache. Return the number of freed bytes."""
        freed_bytes = self.make_room(self.budget, resident_bytes(holdings), holdings, now)
        self._runtime.relieve()
        return freed_bytes

    def refusal(self, needed_bytes: int, resident: int) -> str:
        """Return an out-of-memory message.

        It names the requested bytes, the bytes that cannot be evicted, and the bytes of each session.
        """
        shares = ", ".join(f"{session.values.held_bytes:,}" for session in self.sessions if session.values.held_bytes)
        return (
            f"{needed_bytes:,} bytes do not fit: this executor may use {self.limit:,} bytes, {self.process.reserve:,} of them are reserved for temporary memory of ops, and {resident:,} bytes cannot be evicted (bytes by session: {shares or 'none'}). "
            "Free tensors, use smaller batches, or start the executor with a higher limit (memory_gib, or "
            "`djinn serve --memory-gib`)"
        )

    # --- figures ------------------------------------------------------------------------------------------------

    def note(self, resident: int) -> None:
        """Raise the peak to `resident`, the bytes on the device, if it was lower."""
        self.peak = max(self.peak, resident)

    def update_pressure(self) -> None:
        """Update the pressure level after a session has ended."""
        self.pressure.note(self.resident(), self._evicted_bytes, self.budget)

    def measure(self, resident: int) -> None:
        """Update the figures of the process while tensors take `resident` bytes."""
        self.pressure.note(resident, self._evicted_bytes, self.budget)
        if self.loading_thread is not None:
            self.loading_thread.join()
            self.loading_thread = None
        self.process.measure(resident)

    def reset_peaks(self) -> None:
        """Reset the peaks."""
        self.peak = self.process.peak = 0

    def evicted_to(self, holdings: Iterable[Holding]) -> dict[str, int]:
        """Return the bytes of evicted storages by location: `HOST`, or `DISK`, which includes weight files."""
        evicted_bytes: Counter[str] = Counter()
        for holding in holdings:
            if not holding.resident:
                entry = self._table.get(holding.key)
                evicted_bytes[(entry.location if entry is not None else "") or DISK] += holding.nbytes
        return dict(evicted_bytes)

    def figures(self) -> dict[str, int]:
        """Return the ledger's metrics by name. Sizes are in bytes. `memory_limit` is 0 without a limit."""
        return {
            "memory_limit": 0 if self.on_demand else self.limit,
            "memory_reserve": self.process.reserve,
            "memory_pressure": self.pressure.level,
            "memory_run_peak": self.peak,
            "process_peak": self.process.peak,
            "memory_away": self._evicted_bytes,
            "spill_bytes": self.spilled,
            "evictions": self.counts.evictions,
            "spilled_bytes": self.counts.spilled,
            "restored_bytes": self.counts.restored,
            "reread_bytes": self.counts.reread_bytes,
            "memory_shared": self.shared_bytes(),
            "refused": self.counts.refused,
        }


def _free_nothing() -> None:
    """Do nothing, because no run strategy has device memory."""


def resident_bytes(holdings: Iterable[Holding]) -> int:
    """Return the bytes of storages that are on the device."""
    return sum(holding.nbytes for holding in holdings if holding.resident)
