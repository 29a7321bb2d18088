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
        uses: when the session's storages were used.
    """

    def __init__(self, ledger: Ledger, values: ValueTable, kinds: ValueKinds) -> None:
        self.values, self._kinds = values, kinds
        self.uses = UseHistory()
        self._ledger = ledger
        self._memories: LruCache[bytes, TemplateMemory] = LruCache(TEMPLATES_LIMIT)
        self._used = time.monotonic()
        self._pinned: set[int] = set()  # storages
        self._used_now: frozenset[int] = frozenset()  # storages of a program that runs without a guard
        with ledger.lock:
            ledger.sessions.append(self)

    @property
    def lock(self) -> threading.RLock:
        """The lock of the ledger."""
        return self._ledger.lock

    @property
    def limited(self) -> bool:
        """True if the memory has a limit."""
        return not self._ledger.on_demand

    def idle(self, now: float) -> bool:
        """Return True if the session has run nothing for `IDLE_SECONDS`."""
        return now - self._used > IDLE_SECONDS

    # --- KV caches ----------------------------------------------------------------------------------------------

    def pins(self, handle: int) -> bool:
        """Return True if the storage of a value must stay on the device."""
        storage = storage_of(handle)
        return storage in self._pinned or storage in self._used_now

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheReply:
        """Pin, unpin, evict or restore values, as a `CacheRequest` says. Without handles, all KV caches of the session."""
        ledger, refused = self._ledger, ""
        with ledger.lock:
            self._forget_pins()
            chosen = self._caches(handles)
            storages = {storage_of(handle) for handle in chosen}
            before = self._pinned - storages if action in {"unpin", "evict"} else self._pinned
            self._pinned = before
            try:
                if action in {"pin", "restore"}:
                    self._pinned = before | storages  # none of them evicts another
                    for value in chosen.values():
                        ledger.reload(value)
                elif action == "evict":
                    for holding in self._holdings(chosen):
                        if holding.movable:
                            ledger.evict(holding)
            except (OSError, torch.OutOfMemoryError) as error:
                refused = str(error)
            if action != "pin" or refused:
                self._pinned = before
            self.values.forget_addresses()
            holdings = self._holdings(chosen)
        resident, pinned = ([h.nbytes for h in holdings if h.resident], [h.nbytes for h in holdings if h.pinned])
        which = () if handles else pack_handles([handle for handle in chosen if self.pins(handle)])
        return CacheReply(sum(h.nbytes for h in holdings), sum(resident), sum(pinned), True, refused, which)

    def _forget_pins(self) -> None:
        """Drop the pins of freed values."""
        self._pinned = {storage for storage in self._pinned if self.values.bytes_of(storage)}

    def _restore_pinned(self, outputs: Sequence[int]) -> None:
        """Restore pinned results that a run evicted. If there is no room, the next run restores them."""
        evicted = [self.values[handle] for handle in outputs if self.pins(handle) and handle in self.values]
        with contextlib.suppress(OSError, torch.OutOfMemoryError):
            for value in evicted:
                if has_memory(value):
                    self._ledger.reload(value)

    def _caches(self, handles: Sequence[int]) -> dict[int, torch.Tensor]:
        self._kinds.mark_caches(handles)
        chosen = handles or self.values.handles_of_storages(self._kinds.caches())
        values = {handle: self.values[handle] for handle in chosen if handle in self.values}
        return {handle: value for handle, value in values.items() if has_memory(value)}

    def _holdings(self, values: Mapping[int, torch.Tensor]) -> Sequence[Holding]:
        """Return the storages of these values. Storages that other sessions or copies use are marked as pinned."""
        keys = {storage_key(value) for value in values.values()}
        return [holding for key, holding in self._ledger.survey().items() if key in keys]

    def cache_bytes(self) -> tuple[int, int]:
        """Return the bytes of the session's KV caches, and those of its pinned caches. Thread-safe."""
        storages = self._kinds.caches(), list(self._pinned)
        total, pinned = (sum(map(self.values.bytes_of, group)) for group in storages)
        return total, pinned

    # --- idle sessions ------------------------------------------------------------------------------------------

    def move_away(self) -> dict[str, int]:
        """Evict the idle session's values from the device, and move values on the host to disk. Return bytes by place.

        Each value is restored at its next use. Shared storages stay until all sessions that use them are idle.
        """
        now, ledger = time.monotonic(), self._ledger
        with ledger.lock:
            for holding in ledger.survey().values():
                other_sessions = (session for session in holding.holders if session is not self)
                if self not in holding.holders or not all(session.idle(now) for session in other_sessions):
                    continue
                try:
                    if not holding.resident:
                        ledger.move_to_disk(holding)
                    elif ledger.can_move(holding):
                        ledger.evict(holding)
                except (OSError, RuntimeError) as error:
                    _log.warning("an idle session cannot be spilled", bytes=holding.nbytes, error=str(error))
                    break
            self.values.forget_addresses()
            ledger.relax()
        return self.evicted_to()

    @property
    def moves_again(self) -> bool:
        """True if values of the idle session are in host memory and could move to disk."""
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
        """Return the bytes of the session's evicted values by place. Thread-safe."""
        if self._ledger.all_resident:
            return {}
        holdings: Holdings = {}
        for value in self.values.tensors():
            if has_memory(value):
                self._ledger.holding_of(holdings, value)
        return self._ledger.evicted_to(holdings.values())

    # --- figures ------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the bytes of the session's pinned caches."""
        return {"pinned_caches": self.cache_bytes()[1]}

    def close(self) -> None:
        """Free all storages of the session, because it has ended."""
        with self._ledger.lock:
            self.values.clear()
            if self in self._ledger.sessions:
                self._ledger.sessions.remove(self)
            self._ledger.relax()

    # --- running ------------------------------------------------------------------------------------------------

    def run(
        self,
        digest: bytes,
        template: CompiledTemplate,
        work: RunRequest,
        slots: Sequence[Any],
        run_unguarded: RunUnguarded,
    ) -> RunOutcome:
        """Run a template within the limit. `run_unguarded`: runs it without a guard, if earlier runs stayed far below the limit."""
        ledger = self._ledger
        with ledger.lock:
            self._used = time.monotonic()
            memory = self._template_memory(digest, template, work, slots)
            self._begin(digest, memory, work)
            self.values.forget_addresses()  # restored values have new addresses
            if self._is_far(memory, work):
                outcome = run_unguarded()
            else:
                guard = MemoryGuard(ledger, self, template, memory, work.outputs)
                ledger.process.begin_run()
                outcome = _guarded(template, work, slots, self.values, guard)
                guard.end(complete=not outcome.failures and outcome.stopped_at is None)
                self._after_guarded(work)
            ledger.measure(ledger.resident())
            ledger.clock += memory.lifetimes.steps
            self._used = time.monotonic()
            return outcome

    def _begin(self, digest: bytes, memory: TemplateMemory, work: RunRequest) -> None:
        if self._pinned and any(map(self.pins, work.inputs)):
            if len(self._pinned) > TEMPLATES_LIMIT + len(self.values):
                self._forget_pins()
            self._pinned.update(self._kinds.output_caches(digest, work.outputs))
        self.uses.add(PastRun(digest, memory.lifetimes, self._ledger.clock, [*work.inputs], work.outputs))

    def _is_far(self, memory: TemplateMemory, work: RunRequest) -> bool:
        """Return True if a run will stay far below the limit, and its inputs are on the device."""
        ledger = self._ledger
        if memory.peak is None or self._any_evicted(work):
            return False
        expected_bytes = ledger.resident() + memory.peak
        if expected_bytes > ledger.comfort:
            ledger.drop_cached()
            expected_bytes = ledger.resident() + memory.peak
        if expected_bytes > ledger.comfort:
            return False
        ledger.process.trim_before(memory.peak)
        ledger.note(expected_bytes)
        self._forget_copies(work)
        return True

    def _any_evicted(self, work: RunRequest) -> bool:
        ledger, get = self._ledger, self.values.table.get
        return not ledger.all_resident and any(
            has_memory(value) and ledger.is_evicted(value) for value in map(get, work.inputs)
        )

    def _forget_copies(self, work: RunRequest) -> None:
        """Drop the spilled copies of a program's inputs, because the program may write into the inputs."""
        if self._ledger.spilled:
            for value in map(self.values.table.get, work.inputs):
                if has_memory(value):
                    self._ledger.written(storage_key(value))

    def _after_guarded(self, work: RunRequest) -> None:
        """Count results that were evicted before the run ended, and restore pinned results."""
        for handle in work.outputs:
            value = self.values[handle]
            if has_memory(value) and self._ledger.is_evicted(value):
                self.values.count_storage(handle, self._ledger.holding_of({}, value).nbytes)
        if self._pinned:
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
        """Run a program in the block, first without a guard, until an op runs out of memory.

        Yield a guard if an input was evicted, because the program must then start with it. Otherwise yield None.
        """
        ledger, guards = self._ledger, list[MemoryGuard]()
        memory = self._memories.get(digest) or template_memory(template, 0, ())
        self._memories.store(digest, memory)

        def guard(template: CompiledTemplate) -> MemoryGuard:
            with ledger.lock:
                self._used_now = frozenset()
                guards.append(MemoryGuard(ledger, self, template, memory, work.outputs))
            return guards[0]

        with ledger.lock:
            self._used = time.monotonic()
            self._begin(digest, memory, work)
            evicted = self._any_evicted(work)
            if not evicted:
                self._used_now = frozenset(map(storage_of, work.inputs))
                work.guard = guard
        try:
            yield guard(template) if evicted else None
        finally:
            self._used_now = frozenset()
            ledger.clock += memory.lifetimes.steps
        if guards:
            self.values.forget_addresses()  # restored values have new addresses
            with ledger.lock:
                self._after_guarded(work)
                ledger.relax()


def _guarded(
    template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], values: ValueTable, guard: MemoryGuard
) -> RunOutcome:
    run = TemplateRun(template, work, slots, values, guard=guard)
    run.advance()
    return run.finish()
