"""Memory of one session on its device: guards of its runs, its KV caches, and eviction while it is idle."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core.ir.handles import storage_of
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_core.torch_private import storage_key
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cache_messages import CacheAction, CacheReply
from djinn_server.memory.guard import MemoryGuard
from djinn_server.memory.ledger import Holding, Holdings, Ledger
from djinn_server.memory.spill import HOST
from djinn_server.memory.template_memory import TemplateMemory, bytes_of_inputs, template_memory
from djinn_server.memory.uses import PastRun, UseHistory
from djinn_server.running.run import RunOutcome, TemplateRun
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import ValueTable, has_memory
from djinn_server.value_kinds import ValueKinds

IDLE_SECONDS: Final = 10.0  # idle time after which shared storages may be evicted
TEMPLATES_LIMIT: Final = 512
_log = get_logger("djinn.server")
RunUnguarded = Callable[[], RunOutcome]


class SessionMemory:
    """The storages of one session in the memory ledger.

    Attributes:
        values: the session's values.
        uses: history of the uses of the session's storages.
    """

    def __init__(self, ledger: Ledger, values: ValueTable, kinds: ValueKinds) -> None:
        self.values, self._kinds = values, kinds
        self.uses = UseHistory()
        self._ledger = ledger
        self._memories: LruCache[bytes, TemplateMemory] = LruCache(TEMPLATES_LIMIT)
        self._last_run = time.monotonic()
        self._pinned_storages: set[int] = set()  # storages
        self._running_storages: frozenset[int] = frozenset()  # storages of a program that runs without a guard
        with ledger.lock:
            ledger.sessions.append(self)

    @property
    def lock(self) -> threading.RLock:
        """The lock of the ledger."""
        return self._ledger.lock

    @property
    def limited(self) -> bool:
        """True if the executor has a memory limit, so that runs go through `run` instead of `on_demand`."""
        return not self._ledger.on_demand

    def is_idle(self, now: float) -> bool:
        """Return True if the session has run no program for `IDLE_SECONDS`. `now`: `time.monotonic`."""
        return now - self._last_run > IDLE_SECONDS

    # --- KV caches ----------------------------------------------------------------------------------------------

    def is_fixed(self, handle: int) -> bool:
        """Return True if the storage of a value must stay on the device: a pinned cache, or an input in use."""
        storage = storage_of(handle)
        return storage in self._pinned_storages or storage in self._running_storages

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheReply:
        """Pin, unpin, evict or restore values, as a `CacheRequest` says, and return the reply.

        `handles`: the values; empty: all KV caches of the session. If an error stops the action, the reply has its message.
        """
        ledger, refusal = self._ledger, ""
        with ledger.lock:
            self._forget_pins()
            values = self._caches(handles)
            storages = {storage_of(handle) for handle in values}
            before = self._pinned_storages - storages if action in {"unpin", "evict"} else self._pinned_storages
            self._pinned_storages = before
            try:
                if action in {"pin", "restore"}:
                    self._pinned_storages = before | storages  # so that they do not evict each other
                    for value in values.values():
                        ledger.reload(value)
                elif action == "evict":
                    for holding in self._holdings(values):
                        if holding.movable:
                            ledger.evict(holding)
            except (OSError, torch.OutOfMemoryError) as error:
                refusal = str(error)
            if action != "pin" or refusal:
                self._pinned_storages = before
            self.values.forget_addresses()
            holdings = self._holdings(values)
        total = sum(holding.nbytes for holding in holdings)
        resident_bytes = sum(holding.nbytes for holding in holdings if holding.resident)
        pinned_bytes = sum(holding.nbytes for holding in holdings if holding.fixed)
        pinned = () if handles else pack_handles([handle for handle in values if self.is_fixed(handle)])
        return CacheReply(total, resident_bytes, pinned_bytes, True, refusal, pinned)

    def _forget_pins(self) -> None:
        """Drop the pins of freed values."""
        self._pinned_storages = {storage for storage in self._pinned_storages if self.values.bytes_of(storage)}

    def _restore_pinned(self, outputs: Sequence[int]) -> None:
        """Restore pinned results that a run evicted. If memory is short, the next run restores them."""
        evicted = [self.values[handle] for handle in outputs if self.is_fixed(handle) and handle in self.values]
        with contextlib.suppress(OSError, torch.OutOfMemoryError):
            for value in evicted:
                if has_memory(value):
                    self._ledger.reload(value)

    def _caches(self, handles: Sequence[int]) -> dict[int, torch.Tensor]:
        self._kinds.mark_caches(handles)
        cache_handles = handles or self.values.handles_of_storages(self._kinds.caches())
        values = {handle: self.values[handle] for handle in cache_handles if handle in self.values}
        return {handle: value for handle, value in values.items() if has_memory(value)}

    def _holdings(self, values: Mapping[int, torch.Tensor]) -> Sequence[Holding]:
        """Return the storages of these values, with all facts of the ledger, such as `Holding.fixed`."""
        keys = {storage_key(value) for value in values.values()}
        return [holding for key, holding in self._ledger.survey().items() if key in keys]

    def cache_bytes(self) -> tuple[int, int]:
        """Return the bytes of the session's KV caches, and the bytes of its pinned caches. Thread-safe."""
        storages = self._kinds.caches(), list(self._pinned_storages)
        total, pinned_bytes = (sum(map(self.values.bytes_of, group)) for group in storages)
        return total, pinned_bytes

    # --- idle sessions ------------------------------------------------------------------------------------------

    def evict_idle(self) -> dict[str, int]:
        """Evict the idle session's values from the device, and move values in host memory to disk.

        Return the bytes of evicted values by location (`HOST`, `DISK`). Each value is restored at its next use. Shared
        storages stay until all sessions that use them are idle.
        """
        now, ledger = time.monotonic(), self._ledger
        with ledger.lock:
            for holding in ledger.survey().values():
                other_sessions = (session for session in holding.holders if session is not self)
                if self not in holding.holders or not all(session.is_idle(now) for session in other_sessions):
                    continue
                try:
                    if not holding.resident:
                        ledger.move_to_disk(holding)
                    elif ledger.make_movable(holding):
                        ledger.evict(holding)
                except (OSError, RuntimeError) as error:
                    _log.warning("an idle session cannot be spilled", bytes=holding.nbytes, error=str(error))
                    break
            self.values.forget_addresses()
            ledger.update_pressure()
        return self.evicted_to()

    @property
    def can_move_to_disk(self) -> bool:
        """True if evicted values of the session are in host memory, so that `evict_idle` can move them to disk."""
        return bool(self.evicted_to().get(HOST))

    def restore_all(self) -> None:
        """Restore all evicted values of the session.

        Raises:
            torch.OutOfMemoryError, OSError: a value cannot be restored.
        """
        with self._ledger.lock:
            for value in self.values.tensors():
                if has_memory(value):
                    self._ledger.reload(value)
            self.values.forget_addresses()

    def evicted_to(self) -> dict[str, int]:
        """Return the bytes of the session's evicted values by location (`HOST`, `DISK`). Thread-safe."""
        if self._ledger.all_resident:
            return {}
        holdings: Holdings = {}
        for value in self.values.tensors():
            if has_memory(value):
                self._ledger.holding_of(holdings, value)
        return self._ledger.evicted_to(holdings.values())

    # --- figures ------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the session's memory metrics by name: the bytes of its pinned caches."""
        return {"pinned_caches": self.cache_bytes()[1]}

    def close(self) -> None:
        """Free all storages of the session, because it has ended."""
        with self._ledger.lock:
            self.values.clear()
            if self in self._ledger.sessions:
                self._ledger.sessions.remove(self)
            self._ledger.update_pressure()

    # --- running ------------------------------------------------------------------------------------------------

    def run(
        self,
        digest: bytes,
        template: CompiledTemplate,
        work: RunRequest,
        slots: Sequence[Any],
        run_unguarded: RunUnguarded,
    ) -> RunOutcome:
        """Run a template within the memory limit, and return the outcome.

        Args:
            digest: digest of the template.
            template: the compiled template.
            work: the submission.
            slots: numbers that the submission passes to the template.
            run_unguarded: runs the template without a guard. It is called if the run will stay far below the limit.
        """
        ledger = self._ledger
        with ledger.lock:
            self._last_run = time.monotonic()
            memory = self._template_memory(digest, template, work, slots)
            self._begin(digest, memory, work)
            self.values.forget_addresses()  # restored values have new addresses
            if self._fits_unguarded(memory, work):
                outcome = run_unguarded()
            else:
                guard = MemoryGuard(ledger, self, template, memory, work.outputs)
                ledger.process.begin_run()
                outcome = _guarded(template, work, slots, self.values, guard)
                guard.end(complete=not outcome.failures and outcome.stopped_at is None)
                self._after_guarded(work)
            ledger.measure(ledger.resident())
            ledger.clock += memory.lifetimes.steps
            self._last_run = time.monotonic()
            return outcome

    def _begin(self, digest: bytes, memory: TemplateMemory, work: RunRequest) -> None:
        if self._pinned_storages and any(map(self.is_fixed, work.inputs)):
            if len(self._pinned_storages) > TEMPLATES_LIMIT + len(self.values):
                self._forget_pins()
            self._pinned_storages.update(self._kinds.output_caches(digest, work.outputs))
        self.uses.add(PastRun(digest, memory.lifetimes, self._ledger.clock, [*work.inputs], work.outputs))

    def _fits_unguarded(self, memory: TemplateMemory, work: RunRequest) -> bool:
        """Return True if a run will stay far below the limit, as earlier runs did, and its inputs are on the device."""
        ledger = self._ledger
        if memory.peak is None or self._any_evicted(work):
            return False
        expected_bytes = ledger.resident() + memory.peak
        if expected_bytes > ledger.unguarded_bytes:
            ledger.drop_cache()
            expected_bytes = ledger.resident() + memory.peak
        if expected_bytes > ledger.unguarded_bytes:
            return False
        ledger.process.trim_before(memory.peak)
        ledger.note(expected_bytes)
        self._invalidate_copies(work)
        return True

    def _any_evicted(self, work: RunRequest) -> bool:
        ledger, get = self._ledger, self.values.table.get
        return not ledger.all_resident and any(
            has_memory(value) and ledger.is_evicted(value) for value in map(get, work.inputs)
        )

    def _invalidate_copies(self, work: RunRequest) -> None:
        """Drop the spilled copies of a program's inputs, because the program may write into the inputs."""
        if self._ledger.spilled:
            for value in map(self.values.table.get, work.inputs):
                if has_memory(value):
                    self._ledger.invalidate_copy(storage_key(value))

    def _after_guarded(self, work: RunRequest) -> None:
        """Add bytes of results that were evicted before the run ended. Bring pinned results back to the device."""
        for handle in work.outputs:
            value = self.values[handle]
            if has_memory(value) and self._ledger.is_evicted(value):
                self.values.count_storage(handle, self._ledger.holding_of({}, value).nbytes)
        if self._pinned_storages:
            self._restore_pinned(work.outputs)

    def _template_memory(
        self, digest: bytes, template: CompiledTemplate, work: RunRequest, slots: Sequence[Any]
    ) -> TemplateMemory:
        memory, nbytes = self._memories.get(digest), bytes_of_inputs(map(self.values.table.get, work.inputs))
        if memory is None or not memory.fits(nbytes, slots):
            memory = template_memory(template, nbytes, slots)
        self._memories.store(digest, memory)
        return memory

    @contextlib.contextmanager
    def on_demand(self, digest: bytes, template: CompiledTemplate, work: RunRequest) -> Iterator[MemoryGuard | None]:
        """Return a context in which a program runs without a guard until an op runs out of memory.

        Its value is None, or a guard with which the program must start because an input was evicted.
        """
        ledger, guards = self._ledger, list[MemoryGuard]()
        memory = self._memories.get(digest) or template_memory(template, 0, ())
        self._memories.store(digest, memory)

        def guard(template: CompiledTemplate) -> MemoryGuard:
            with ledger.lock:
                self._running_storages = frozenset()
                guards.append(MemoryGuard(ledger, self, template, memory, work.outputs))
            return guards[0]

        with ledger.lock:
            self._last_run = time.monotonic()
            self._begin(digest, memory, work)
            evicted = self._any_evicted(work)
            if not evicted:
                self._running_storages = frozenset(map(storage_of, work.inputs))
                work.guard = guard
        try:
            yield guard(template) if evicted else None
        finally:
            self._running_storages = frozenset()
            ledger.clock += memory.lifetimes.steps
        if guards:
            self.values.forget_addresses()  # restored values have new addresses
            with ledger.lock:
                self._after_guarded(work)
                ledger.update_pressure()


def _guarded(
    template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], values: ValueTable, guard: MemoryGuard
) -> RunOutcome:
    run = TemplateRun(template, work, slots, values, guard=guard)
    run.advance()
    return run.finish()
