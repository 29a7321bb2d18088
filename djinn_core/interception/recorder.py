"""The program that a thread is recording, and when it is cut and sent."""

from __future__ import annotations

import threading
import weakref
from types import CodeType

import attrs

from djinn_core.interception.port import Answer, Submission, port
from djinn_core.interception.storage import Storage, freed
from djinn_core.ir.program import Call, Program, Slot

Entry = tuple[Call, tuple[int, ...], tuple[Slot, ...], CodeType, int]

# Serialises cutting and sending, so that programs arrive in the order in which they were cut. Reentrant, because cutting
# one thread's program may demand that another's goes first.
sending = threading.RLock()


@attrs.frozen
class Ask:
    """What a cut asks for beside running the program."""

    fetch: tuple[int, ...] = ()
    describe: tuple[int, ...] = ()
    synchronize: bool = False


class Recorder:
    """Records one thread's program.

    Entries are appended without a lock: a list's `append` is atomic, and `cut` takes a prefix. At most one recorder has
    unsent writes to a storage: using it from another thread sends that program first (`touch`).
    """

    __slots__ = ("__weakref__", "captures", "entries", "epoch")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.epoch = 0
        self.captures: list[list[Entry]] = []

    def touch(self, storage: Storage) -> None:
        """Order the unsent work of other threads on `storage` before what this thread records next."""
        with sending:
            last = storage.user
            if last is not None and last is not self:
                if storage.written is last and storage.written_at == last.epoch:
                    last.cut()
                elif last.entries:
                    storage.readers = (storage.readers or set()) | {last}
            storage.user = self

    def claim(self, storage: Storage) -> None:
        """Note a write to `storage`, after the unsent reads of other threads."""
        if storage.readers:
            with sending:
                readers, storage.readers = storage.readers, None
                for reader in readers - {self}:
                    reader.cut()
        storage.written = self
        storage.written_at = self.epoch

    def cut(self) -> None:
        """Send what was recorded so far, without waiting."""
        with sending:
            if self.entries:
                port.runtime().submit(self._take(Ask()))

    def checkpoint(self) -> None:
        """Cut a program that has grown to the limit, so that a loop without a sync point runs in bounded memory."""
        if not self.captures:
            self.cut()

    def ask(self, ask: Ask) -> Answer:
        """Send what was recorded so far and wait for what `ask` names."""
        runtime = port.runtime()
        with sending:
            if ask.synchronize:
                for other in recorders():
                    other.cut()
            number = runtime.submit(self._take(ask))
        return runtime.wait(number)

    def _take(self, ask: Ask) -> Submission:
        count = len(self.entries)
        taken = self.entries[:count]
        del self.entries[:count]
        self.epoch += 1
        for captured in self.captures:
            captured.extend(taken)
        dead = self._collect_freed()
        program = freeze(taken, dead)
        inside = program.dead
        free = tuple(h for h in dead if h not in inside)
        return Submission(program, free, ask.fetch, ask.describe, ask.synchronize)

    def _collect_freed(self) -> list[int]:
        """Freed handles that no other thread's unsent program uses; the others wait."""
        mine: list[int] = []
        for _ in range(len(freed)):
            handle, storage = freed.popleft()
            users = {storage.user, *(storage.readers or ())} - {self, None}
            if any(u.entries for u in users if u is not None):
                freed.append((handle, storage))
            else:
                mine.append(handle)
        return mine


def freeze(entries: list[Entry], dead: list[int]) -> Program:
    """The entries as a frozen program; handles in `dead` that it mentions die with it."""
    operands: list[int] = []
    slots: list[Slot] = []
    for entry in entries:
        operands += entry[1]
        slots += entry[2]
    return Program(
        calls=tuple([e[0] for e in entries]),
        operands=tuple(operands),
        slots=tuple(slots),
        dead=frozenset(dead).intersection(operands) if dead else frozenset(),
        sites=tuple([(e[3], e[4]) for e in entries]),
    )


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.recorder = Recorder()
        with _all_lock:
            _all.add(self.recorder)


# Weak: a recorder whose thread has ended lives as long as a storage that its program touches.
_all: weakref.WeakSet[Recorder] = weakref.WeakSet()
_all_lock = threading.Lock()
_local = _PerThread()


def current() -> Recorder:
    """This thread's recorder."""
    return _local.recorder


def recorders() -> list[Recorder]:
    """The recorders of all threads."""
    with _all_lock:
        return list(_all)


def forget_everything() -> None:
    """In a forked child: the programs belong to the parent."""
    global _local
    _all.clear()
    freed.clear()
    _local = _PerThread()
