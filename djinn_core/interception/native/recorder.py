"""Recorder of a thread over a program in C++: entries, epoch and limit are the program's own counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn_core.interception.native.entries import (
    DIFFERENTIATING,
    ENTRIES,
    EPOCH,
    FORGOTTEN,
    LIMIT,
    NODE,
    UNTOLD,
    WATCHED,
    Entries,
    UnsentEntries,
)
from djinn_core.interception.native.library import implement, ops
from djinn_core.interception.native.values import live_values, still_to_free
from djinn_core.interception.recording.module_calls import at_node
from djinn_core.interception.recording.recorder import Recorder, Recorders, SyncRequest, current, recorders
from djinn_core.interception.runtime_interface import WHOLE, Submission, port
from djinn_core.ir.handles import number_storages_by, storage_of
from djinn_core.ir.module_path import ModuleCall

if TYPE_CHECKING:
    from djinn_core.interception.native.values import NativeStorage as Storage
    from djinn_core.interception.native.values import NativeValue as Value


class _Thread(threading.local):
    begins = False


def _memory_of(tensor: torch.Tensor) -> memoryview[int]:
    array: Any = tensor.numpy()
    return memoryview(array)


_thread = _Thread()
_NO_PROGRAM: Final = -1
_no_counters: Final = _memory_of(torch.zeros(NODE + 1, dtype=torch.int64))  # of recorders whose threads have ended
_by_program: Final[dict[int, NativeRecorder]] = {}


class NativeRecorder(Recorder):
    """Records one thread's program, which is in C++.

    Attributes:
        program: its number. counters: its counters, which are memory of C++.
    """

    __slots__ = ("_module", "_module_moments", "_moments", "_watcher", "counters", "program")

    def __init__(self, shared: Recorders, program: int | None = None) -> None:
        """`program`: number of a thread's program; None: a new one that no thread records yet."""
        self.program = int(ops.new_program()) if program is None else program
        self.counters = _memory_of(ops.counters(self.program))
        self._moments: list[tuple[int, ModuleCall | None]] = []
        self._module: ModuleCall | None = None
        self._watcher: Any = None
        self._module_moments: list[Any] | None = None
        super().__init__(shared)
        for other in [*_by_program.values()]:
            if other.done:
                other.retire()
        _by_program[self.program] = self

    @classmethod
    def of_thread(cls, shared: Recorders) -> Recorder:
        """The recorder of the present thread."""
        _thread.begins = True
        try:
            return cls(shared, int(ops.current_program()))
        finally:
            _thread.begins = False

    def retire(self) -> None:
        """Give the program to another thread: this one has ended, and everything was sent."""
        if _by_program.get(self.program) is self:
            del _by_program[self.program]
            number, self.program, self.counters = self.program, _NO_PROGRAM, _no_counters
            ops.let_go(number)

    @staticmethod
    def end_session() -> None:
        """Forget what was freed, and states of generators: a session has ended, and the next one has no use for it."""
        ops.end_session()

    @staticmethod
    def begin_in_child() -> None:
        """Forget everything in a forked child, before it records."""
        _by_program.clear()
        ops.forget_programs()
        ops.set_forked(port.forked)

    @staticmethod
    def any_unsent(_recorders: Iterable[Recorder]) -> bool:
        """True if an unsent program has values."""
        return bool(ops.any_unsent_values())

    def begin_on_thread(self) -> None:
        """The present thread records on this recorder from now on."""
        ops.switch_program(self.program)

    def drop(self) -> None:
        """Forget what was recorded. Nothing records on this recorder any more."""
        self.retire()

    @property  # type: ignore[override]
    def entries(self) -> UnsentEntries:
        """Unsent entries."""
        return UnsentEntries(self)

    @entries.setter
    def entries(self, _: Any) -> None:
        pass

    @property
    def epoch(self) -> int:
        """Number of cuts so far."""
        return self.counters[EPOCH]

    @epoch.setter
    def epoch(self, _: int) -> None:
        pass

    @property
    def limit(self) -> int:
        """Number of entries at which C++ calls `cut_at_limit`."""
        return self.counters[LIMIT]

    @limit.setter
    def limit(self, limit: int) -> None:
        self.counters[LIMIT] = limit

    @property
    def differentiating(self) -> bool:
        """True if the thread is in a backward pass."""
        return bool(self.counters[DIFFERENTIATING])

    @differentiating.setter
    def differentiating(self, on: bool) -> None:
        self.counters[DIFFERENTIATING] = on

    @property
    def watcher(self) -> Any:
        """Observer that is called for every op."""
        return self._watcher

    @watcher.setter
    def watcher(self, watcher: Any) -> None:
        self._watcher = watcher
        self.counters[WATCHED] = watcher is not None

    @property
    def module(self) -> ModuleCall | None:
        """The call of a module that the thread is inside."""
        return self._module

    @module.setter
    def module(self, module: ModuleCall | None) -> None:
        self._module = module
        if self._module_moments is not None:
            self.counters[NODE] = FORGOTTEN
        count = self.counters[ENTRIES]
        moments = self._moments
        if moments and moments[-1][0] == count:
            moments[-1] = count, module
        else:
            moments.append((count, module))

    @property
    def module_moments(self) -> list[Any] | None:  # type: ignore[override]
        """As `Recorder.module_moments`. While a timeline is recorded, C++ reports autograd nodes."""
        return self._module_moments

    @module_moments.setter
    def module_moments(self, moments: list[Any] | None) -> None:
        self._module_moments = moments
        self.counters[NODE] = UNTOLD if moments is None else FORGOTTEN

    def order_after(self, storage: Storage) -> None:  # type: ignore[override]
        """Order the unsent work of other threads on `storage` before the entries that this thread records next."""
        ops.note_read(storage.holder)

    def begin_writes(self, targets: Iterable[torch.Tensor]) -> None:
        """Send unsent reads of `targets` by other threads, then note the writes."""
        for target in targets:
            ops.note_write(target)

    def take_back(self, value: Value, _names: Container[str]) -> bool:  # type: ignore[override]
        """Take back the last instruction where it made the empty memory of `value`; whether it was."""
        if self.fixed is not None and len(self.entries) and self.entries[-1].handles == self.fixed.handles:
            return False
        return bool(ops.take_back(value.holder))

    def settle(self, used: Iterable[Any], written: Iterable[Any]) -> None:
        """C++ has done this."""

    def look(self, first: int) -> Entries:
        """The unsent entries from `first` on."""
        columns = ops.look(self.program, first)
        return Entries(columns, self._modules(columns, first))

    def _modules(self, columns: Sequence[torch.Tensor], first: int = 0) -> list[ModuleCall | None]:
        """The call of a module, or the autograd node, in which each entry was issued."""
        nodes: list[int] = columns[5].tolist()
        count = len(nodes)
        made: list[ModuleCall | None] = []
        moments = [(at - first, module) for at, module in self._moments]
        ends = [at for at, _ in moments[1:]] + [count]
        begin = moments[0][0] if moments else count
        made += [None] * max(0, min(begin, count))
        for (_, module), end in zip(moments, ends, strict=True):
            made += [module] * (min(end, count) - len(made))
        made += [None] * (count - len(made))
        if not nodes or (min(nodes) == -1 and max(nodes) == -1):
            return made
        calls = self.forward_calls
        return [(node, None, calls) if m is None and node != -1 else m for node, m in zip(nodes, made, strict=True)]

    def take(self, ask: SyncRequest, cut: Callable[[Any], int] = len) -> Submission:
        """Take what was recorded so far, as far as `cut` says, to be submitted before `sending` is released."""
        from djinn_core.interception.recording.recorder import NOTHING

        if self.program == _NO_PROGRAM:  # another thread has taken all since the caller looked
            return Submission(NOTHING, (), ask.fetch, ask.describe, ask.synchronize)
        shared = self._shared
        meta_only = shared.meta_only
        if meta_only.storages:
            meta_only.sift(self.entries)
            meta_only.refuse((*ask.fetch, *ask.describe))
        dead, shared.waiting = ops.freed(self.program)
        count = -1 if cut is len else cut(self.entries)
        columns = ops.take(self.program, count)
        taken = Entries(columns, self._modules(columns))
        self._moments = [(max(0, at - len(taken)), module) for at, module in self._moments[-1:]]
        if (timeline := port.timeline) is not None:
            timeline.taken(self, len(taken))
        port.ops_captured += len(taken)
        if len(taken):
            if not self._predictor.taken(taken) or (self.limit, port.checkpoint_instructions) != self._usual:
                self._set_limit()
            if not ask.fetch:
                self.fetches.sent(taken)
        if count >= 0 and len(self.entries):
            used = set(self.look(0).handles)
            ops.put_back([handle for handle in dead if handle in used], self.program)
            dead = [handle for handle in dead if handle not in used]
        self.uploaded = self.uploads = 0
        for captured in self.captures:
            captured.entries.extend(taken)
            captured.fetched.update(ask.fetch)
        known, at = self._predictor.place if len(taken) else (None, WHOLE)
        if count < 0 and self.ended:
            self.retire()
        return self._submission(taken, dead, ask, known, at)

    def _submission(self, taken: Entries, dead: list[int], ask: SyncRequest, known: object, at: int) -> Submission:
        from djinn_core.interception.recording.recorder import NOTHING, freeze

        meta_only = self._shared.meta_only
        present: Any = taken
        if meta_only.storages:
            present, known = meta_only.sift(taken), None  # it may have fewer instructions
            dead = self._forget_meta_only(dead)
        handles = [*dead, *self._take_dead()] if self.dead else dead
        if not len(present):
            program = NOTHING
        else:
            program = present.program(handles) if isinstance(present, Entries) else freeze(present, handles)
        inside = program.dead
        free = tuple(filterfalse(inside.__contains__, handles)) if handles and inside != set(handles) else ()
        return Submission(program, free, ask.fetch, ask.describe, ask.synchronize, known, at)

    def _forget_meta_only(self, dead: list[int]) -> list[int]:
        """Return those of the dead handles whose values exist. A storage without data is forgotten with its last value."""
        storages = self._shared.meta_only.storages
        gone = {storage_of(handle) for handle in dead}.intersection(storages)
        if not gone:
            return dead
        left = {storage_of(handle) for handle in (*(handle for handle, _ in live_values()), *still_to_free())}
        present = [handle for handle in dead if storage_of(handle) not in storages]
        storages -= gone - left
        return present


def recorder_of(program: int) -> Recorder | None:
    """The recorder over a program of C++."""
    return _by_program.get(program)


def _unsent_ops() -> int:
    """Entries of all threads that were not taken yet."""
    return sum(recorder.counters[ENTRIES] for recorder in list(_by_program.values()))


def _cut(program: int) -> None:
    if (recorder := recorder_of(program)) is not None:
        recorder.cut()


def _at_limit() -> None:
    current().cut_at_limit()


def _at_node(node: int) -> None:
    recorder: Any = current()
    if recorder.module is None:
        at_node(recorder)
    recorder.counters[NODE] = node


def _begin_program(_program: int) -> None:
    if not _thread.begins:
        current()


def _synchronize() -> None:
    from djinn_core.interception import sync

    sync.synchronize()


def register() -> None:
    """Have C++ call these."""
    implement(cut=_cut, at_limit=_at_limit, at_node=_at_node, begin_program=_begin_program, synchronize=_synchronize)
    number_storages_by(ops.reserve_storages)  # plans make values beside those that programs record
    recorders.kind = NativeRecorder
    port.ops_unsent = _unsent_ops
    recorders.begin_thread()
