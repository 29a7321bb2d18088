"""Memory of one session under its device's limit: a program runs directly, or as a limited run where memory is short."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from djinn_core.ir.handles import storage_of
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.cache_messages import CacheAction, CacheReply
from djinn_core.wire.messages import ValueHints
from djinn_server.memory.allocation import Allocation
from djinn_server.memory.budgets import ACTIVATION, CACHE, KINDS, NAMES, Usage, kind_of
from djinn_server.memory.ledger import Holdings, Ledger
from djinn_server.memory.limited_run import LimitedRun
from djinn_server.memory.memory_estimate import MemoryEstimate, bytes_of_inputs, estimate_memory, unknown_memory
from djinn_server.memory.next_use import LastUses, NextUsePredictor
from djinn_server.running.run import RunOutcome, TemplateRun, environment_of
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import ValueTable, has_memory

IDLE_SECONDS = 10.0  # after which a session's values make room before those of others
OUTLOOKS_LIMIT = 512
PAST_RUNS: Final = 256
FAR: Final = 0.5  # of what is comfortable; below it nothing is evicted soon
LETTERS_LIMIT = 16 << 20  # of what clients say about their values
_log = get_logger("djinn.server")
Plain = Callable[[CompiledTemplate, RunRequest, Sequence[Any], ValueTable], RunOutcome]


class PastRun(msgspec.Struct):
    """A run far from the limit, of which it is not noted yet what it used.

    Attributes:
        began: steps that programs had run on the device before it.
    """

    digest: bytes
    phase: str
    estimate: MemoryEstimate
    inputs: list[int]
    outputs: list[int]
    began: int


class SessionMemory:
    """The holdings of one session, and the choice of how each of its programs runs.

    Attributes:
        ahead: bytes that programs hold which run before their submissions come. give_way: frees them; called with the lock.
    """

    def __init__(self, ledger: Ledger, values: ValueTable, name: str = "") -> None:
        self.values = values
        self.name = name
        self.predictor = NextUsePredictor()
        self.uses = LastUses(values)
        self._ledger = ledger
        self._estimates: LruCache[bytes, MemoryEstimate] = LruCache(OUTLOOKS_LIMIT)
        self._used = time.monotonic()
        self.phase = ""
        self._hints: LruCache[bytes, ValueHints] = LruCache(OUTLOOKS_LIMIT)
        self._kinds: dict[int, str] = {}
        self._usage = Usage(values)
        self._pinned: set[int] = set()  # storages
        self._used_now: frozenset[int] = frozenset()  # storages of a program that runs without a guard
        self._past: deque[PastRun] = deque(maxlen=PAST_RUNS)
        self.ahead = 0
        self.give_way: Callable[[], None] = _nothing
        with ledger.lock:
            ledger.sessions.append(self)

    @property
    def lock(self) -> threading.RLock:
        """As `Ledger.lock`."""
        return self._ledger.lock

    def idle(self, now: float) -> bool:
        """True if the session has done nothing for `IDLE_SECONDS`."""
        return now - self._used > IDLE_SECONDS

    def learn(self, hints: ValueHints) -> None:
        """Note the kinds of a template's values, as the client says."""
        self._hints.store(hints.digest, hints)
        while sum(map(_letters, self._hints.values())) > LETTERS_LIMIT:
            del self._hints[next(iter(self._hints))]

    def kind(self, handles: Iterable[int]) -> str:
        """Kind of values that share memory, as given by the client; of several kinds the one that is kept longest."""
        found = [self._kinds.get(handle, ACTIVATION) for handle in handles]
        return max(found, key=KINDS.index, default=ACTIVATION)

    def _note_kinds(self, digest: bytes, work: RunRequest) -> None:
        hints = self._hints.get(digest)
        if hints is None:
            return
        self.phase = hints.phase
        if len(self._kinds) > 2 * OUTLOOKS_LIMIT + 4 * len(
            self.values
        ):  # before the kinds of the outputs are added: the outputs have no values yet
            self._kinds = {handle: kind for handle, kind in self._kinds.items() if handle in self.values}
        for handles, letters in ((work.inputs, hints.inputs), (work.outputs, hints.outputs)):
            self._kinds.update((h, kind_of(chr(letter))) for h, letter in zip(handles, letters, strict=False))
        if self._pinned and any(map(self.pins, work.inputs)):
            if len(self._pinned) > OUTLOOKS_LIMIT + len(self.values):
                self._forget_pins()
            self._pinned.update(storage_of(h) for h in work.outputs if self._kinds.get(h) == CACHE)

    def pins(self, handle: int) -> bool:
        """True if the memory of a value must stay where it is."""
        storage = storage_of(handle)
        return storage in self._pinned or storage in self._used_now

    def caches(self, action: CacheAction, handles: Sequence[int]) -> CacheReply:
        """Carry out a `CacheRequest` for these values; for all KV caches of the session if it names none."""
        ledger, refused = self._ledger, ""
        with ledger.lock:
            self._forget_pins()
            chosen = self._caches(handles)
            storages = {storage_of(handle) for handle in chosen}
            before = self._pinned - storages if action in {"unpin", "evict"} else self._pinned
            self._pinned = before
            try:
                if action in {"pin", "restore"}:
                    self._pinned = before | storages  # none of them makes room for another
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
            held = self._holdings(chosen)
        resident, pinned = ([h.nbytes for h in held if h.resident], [h.nbytes for h in held if h.pinned])
        which = () if handles else pack_handles([handle for handle in chosen if self.pins(handle)])
        return CacheReply(sum(h.nbytes for h in held), sum(resident), sum(pinned), True, refused, which)

    def _forget_pins(self) -> None:
        """Forget the pins of what is gone."""
        self._pinned = {storage for storage in self._pinned if self.values.bytes_of(storage)}

    def _restore_pinned(self, outputs: Sequence[int]) -> None:
        """Bring pinned results back that a run had to evict before its end; where there is no room, the next run does."""
        away = [self.values[handle] for handle in outputs if self.pins(handle) and handle in self.values]
        with contextlib.suppress(OSError, torch.OutOfMemoryError):
            for value in away:
                if has_memory(value):
                    self._ledger.reload(value)

    def _caches(self, handles: Sequence[int]) -> dict[int, torch.Tensor]:
        found = handles or [handle for handle, kind in self._kinds.items() if kind == CACHE]
        self._kinds.update(dict.fromkeys(handles, CACHE))
        values = {handle: self.values[handle] for handle in found if handle in self.values}
        return {handle: value for handle, value in values.items() if has_memory(value)}

    def _holdings(self, values: Mapping[int, torch.Tensor]) -> Sequence[Allocation]:
        holdings: Holdings = {}
        for handle, value in values.items():
            self._ledger.look(holdings, value).pinned = self.pins(handle)
        return list(holdings.values())

    def working_set(self) -> dict[str, int]:
        """Bytes that its last program used, by kind; for any thread. While a program runs on the device, those of an earlier one."""
        if self._past and self._ledger.lock.acquire(blocking=False):
            try:
                self.catch_up()
            finally:
                self._ledger.lock.release()
        return {name: self._usage.bytes.get(kind, 0) for kind, name in NAMES.items()}

    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of its live KV caches, and those of them that are pinned; for any thread."""
        caches = {storage_of(handle) for handle, kind in list(self._kinds.items()) if kind == CACHE}
        held, pinned = (sum(map(self.values.bytes_of, storages)) for storages in (caches, list(self._pinned)))
        return held, pinned

    def evict_all(self) -> None:
        """Evict all values that may be moved, because the session is idle; each is reloaded when it is used.

        What other sessions have as well stays, until they are idle.
        """
        now = time.monotonic()
        with self._ledger.lock:
            for holding in self._ledger.survey().values():
                others = (session for session in holding.holders if session is not self)
                if self in holding.holders and holding.movable and all(session.idle(now) for session in others):
                    try:
                        self._ledger.evict(holding)
                    except OSError as error:
                        _log.warning(
                            "bytes of an idle session cannot be spilled", bytes=holding.nbytes, error=str(error)
                        )
                        break
            self.values.forget_addresses()
            self._ledger.relax()

    def evicted_bytes(self) -> int:
        """Bytes of its values that lie elsewhere; for any thread."""
        return sum(holding.nbytes for holding in self._holdings(self._tensors()) if not holding.resident)

    def _tensors(self) -> dict[int, torch.Tensor]:
        return {handle: value for handle, value in self.values.items() if has_memory(value)}

    def figures(self) -> dict[str, int]:
        """Bytes that its last program used, by kind, and which share of the memory the budget of its phase gives to each."""
        used = {f"used_{name}": nbytes for name, nbytes in self.working_set().items()}
        shares = self._ledger.budgets.shares(self.phase)
        used["pinned_caches"] = self.cache_bytes()[1]
        return used | {f"budget_{name}": int(shares[kind] * self._ledger.budget) for kind, name in NAMES.items()}

    def close(self) -> None:
        """End the session: it holds nothing any more."""
        with self._ledger.lock:
            self.values.clear()
            if self in self._ledger.sessions:
                self._ledger.sessions.remove(self)
            self._ledger.budgets.forget(id(self))
            self._ledger.relax()

    def run(
        self, digest: bytes, template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], plain: Plain
    ) -> RunOutcome:
        """Run a template within the limit; `plain` runs it where memory is not short."""
        ledger = self._ledger
        if ledger.on_demand:
            return self._run_on_demand(template, work, slots, plain)
        with ledger.lock:
            self._used = time.monotonic()
            estimate = self._estimate(digest, template, work, slots)
            self._note_kinds(digest, work)
            self.values.forget_addresses()  # what was moved to the host comes back elsewhere
            past = PastRun(digest, self.phase, estimate, [*work.inputs], work.outputs, ledger.steps)
            wanted = ledger.resident() + estimate.peak
            if ledger.all_resident and wanted <= FAR * ledger.comfort:
                ledger.expect(estimate.peak)
                ledger.note(wanted)
                outcome = plain(template, work, slots, self.values)
                self._past.append(past)
            else:
                self.catch_up()
                self._begin(past)
                outcome = self._run_near(template, work, slots, plain, estimate)
                self._end(past)
            ledger.measure(ledger.resident())
            ledger.steps += estimate.lifetimes.steps
            self._used = time.monotonic()
            return outcome

    @property
    def limited(self) -> bool:
        """True if the memory has a limit."""
        return not self._ledger.on_demand

    def _run_on_demand(
        self, template: CompiledTemplate, work: RunRequest, slots: Sequence[Any], plain: Plain
    ) -> RunOutcome:
        with self.on_demand(template, work) as guard:
            if guard is None:
                return plain(template, work, slots, self.values)
            run = TemplateRun(template, work, slots, self.values, guard=guard)
            run.advance()
            return run.finish()

    @contextlib.contextmanager
    def on_demand(self, template: CompiledTemplate, work: RunRequest) -> Iterator[LimitedRun | None]:
        """A block in which a program runs as it is until an op runs out of memory, and under a guard from there.

        Gives the guard under which the program has to begin, if an input was evicted; None otherwise.
        """
        ledger, guards = self._ledger, list[LimitedRun]()

        def guard(template: CompiledTemplate) -> LimitedRun:
            with ledger.lock:
                self._used_now = frozenset()
                hints = ledger.hints(ledger.survey())
                guards.append(LimitedRun(ledger, template, unknown_memory(template), hints, hints.of_session(self)))
            return guards[0]

        with ledger.lock:
            self._used = time.monotonic()
            self._used_now = frozenset(map(storage_of, work.inputs))
            there = ledger.all_resident or not any(
                has_memory(value) and ledger.is_evicted(value) for value in map(self.values.table.get, work.inputs)
            )
        try:
            if there:
                work.guard = guard
            yield None if there else guard(template)
        finally:
            self._used_now = frozenset()
        if guards:
            self.values.forget_addresses()  # what was moved to the host comes back elsewhere
            with ledger.lock:
                self._count_away(work.outputs)
                ledger.relax()

    def _run_near(
        self,
        template: CompiledTemplate,
        work: RunRequest,
        slots: Sequence[Any],
        plain: Plain,
        estimate: MemoryEstimate,
    ) -> RunOutcome:
        """Run a template that may come near the limit, or uses what lies elsewhere."""
        ledger = self._ledger
        if self._settle(self._inputs(work), estimate):
            return plain(template, work, slots, self.values)
        hints = ledger.hints(ledger.survey())
        guard = LimitedRun(ledger, template, estimate, hints, hints.of_session(self))
        ledger.begin_run()
        run = TemplateRun(template, work, slots, self.values, guard=guard)
        run.advance()
        outcome = run.finish()
        guard.end()
        self._count_away(work.outputs)
        if self._pinned:
            self._restore_pinned(work.outputs)
        return outcome

    def catch_up(self) -> None:
        """Note what was used by runs far from the limit, of which only the latest are known. Called with the lock."""
        past = self._past
        if len(past) == PAST_RUNS:
            self.uses.forgot(past[0].began)
        for run in past:
            self._begin(run)
            self._end(run)
        past.clear()

    def _begin(self, run: PastRun) -> None:
        self.predictor.begin(run.digest, run.estimate.lifetimes, run.inputs)
        self._usage.begin(run.phase, run.digest, self._with_kinds(run.inputs))

    def _end(self, run: PastRun) -> None:
        """Note what a run has used, and report it to the budgets."""
        used = self._usage.end(run.phase, self._with_kinds(run.outputs), run.estimate.peak)
        self._ledger.budgets.observe(run.phase, id(self), used)
        self.predictor.end(run.digest, run.outputs, self.values.__contains__)
        self.uses.note(run.estimate.lifetimes, run.began, run.inputs, run.outputs)

    def needed_ahead(self, digest: bytes, inputs: Sequence[torch.Tensor], slots: Sequence[Any]) -> int | None:
        """Bytes that a template needs beside these inputs, where it may run before its submission comes; None where it may not.

        It may where the inputs are in memory and a run stays far from the limit, with room for what the submission itself would take.
        """
        ledger, known = self._ledger, self._estimates.get(digest)
        if known is None or not known.fits(bytes_of_inputs(inputs), slots):
            return None
        if not ledger.all_resident and any(has_memory(value) and ledger.is_evicted(value) for value in inputs):
            return None
        return known.peak if ledger.resident() + 2 * known.peak <= ledger.comfort else None

    def _with_kinds(self, handles: Iterable[int]) -> list[tuple[int, str]]:
        return [(handle, self._kinds.get(handle, ACTIVATION)) for handle in handles]

    def _count_away(self, outputs: Sequence[int]) -> None:
        """Count results that were evicted before the run ended."""
        for handle in outputs:
            value = self.values[handle]
            if has_memory(value) and self._ledger.is_evicted(value):
                self.values.count(handle, self._ledger.look({}, value).nbytes)

    def _estimate(
        self, digest: bytes, template: CompiledTemplate, work: RunRequest, slots: Sequence[Any]
    ) -> MemoryEstimate:
        known = self._estimates.get(digest)
        inputs = map(self.values.table.get, work.inputs)
        if known is None or not known.fits(bytes_of_inputs(inputs), slots):
            env = environment_of(template, work, slots, self.values)
            known = estimate_memory(template, env, self._ledger.sizes())
        self._estimates.store(digest, known)
        return known

    def _inputs(self, work: RunRequest) -> Holdings:
        found: Holdings = {}
        for number, handle in enumerate(work.inputs):
            if handle in self.values and has_memory(value := self.values[handle]):
                self._ledger.look(found, value).places.add(number)
        return found

    def _settle(self, inputs: Holdings, estimate: MemoryEstimate) -> bool:
        """Prepare a run that stays far from the limit: load its inputs, and return True; False if it must be a limited run.

        Values of idle sessions are evicted for it.
        """
        ledger = self._ledger
        wanted = sum(h.nbytes for h in inputs.values() if not h.resident) + estimate.peak
        resident = ledger.resident()
        if resident + wanted > ledger.comfort:
            resident = ledger.without_runs_ahead()
        if resident + wanted > ledger.comfort:
            holdings = ledger.survey()
            hints = ledger.hints(holdings)
            idle = [h for key, h in holdings.items() if key not in inputs and hints.of(h).idle]
            if idle:
                describe = ledger.between_programs(hints)
                resident -= ledger.make_room(ledger.budget - ledger.comfort + wanted, resident, idle, describe)
            if resident + wanted > ledger.comfort:
                return False
        ledger.expect(wanted)
        self._reload(inputs, estimate)
        ledger.note(resident + wanted)
        return True

    def _reload(self, inputs: Holdings, estimate: MemoryEstimate) -> None:
        first = estimate.lifetimes.first_input
        written = {place - first for place in estimate.written_inputs()}
        for holding in inputs.values():
            if not holding.resident:
                self._ledger.restore(holding)
            if not written.isdisjoint(holding.places):
                self._ledger.written(holding.key)


def _nothing() -> None:
    """Nothing runs ahead."""


def _letters(hints: ValueHints) -> int:
    return len(hints.inputs) + len(hints.outputs)
