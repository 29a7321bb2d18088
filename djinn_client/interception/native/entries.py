"""Programs that C++ recorded, as arrays that Python reads as a `Program` and as a sequence of `Entry`."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, overload

import numpy as np

from djinn_client.interception.native import calls as native_calls
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.entry import Entry
from djinn_core.ir.module_path import ForwardCalls, ModuleCall
from djinn_core.ir.program import Call, Program, Site, Slot
from djinn_core.ir.slot_arrays import Kinds, Words, decoded_slots

ENTRIES, EPOCH, LIMIT, DIFFERENTIATING = range(4)  # counters of a program

_sites: Final[dict[int, Site]] = {}
_next_site = 0
_sites_lock = threading.RLock()
_NOWHERE: Final[Site] = ((lambda: None).__code__, 0)


def site_of(number: int) -> Site:
    """Return the position in the user's code for a site number of C++."""
    if number < 0:
        return _NOWHERE
    site = _sites.get(number)
    if site is None:
        with _sites_lock:
            _learn_sites()
        site = _sites.get(number, _NOWHERE)  # C++ keeps the last few thousand code objects
    return site


def begin_in_child() -> None:
    """Replace the lock in a forked child, because a thread of the parent may have held it."""
    global _sites_lock
    _sites_lock = threading.RLock()


def _learn_sites() -> None:
    global _next_site
    first, *new = ops.sites_from(_next_site)
    for number in [number for number in _sites if number < first]:
        del _sites[number]
    _next_site = max(_next_site, first)
    for code, offset in zip(new[::2], new[1::2], strict=True):
        code_object = ctypes.cast(code, ctypes.py_object)
        _sites[_next_site] = code_object.value, offset
        ctypes.pythonapi.Py_DecRef(code_object)  # the reference that C++ handed over
        _next_site += 1


# Layout: total bytes; counts of entries, handles, scalars and freed handles that wait; a 16-byte hash; the offset of
# each part. See taken.cpp.
_HEADER: Final = struct.Struct("<5q16x9q")
_HASH: Final = slice(40, 56)
Moments = Mapping[int, ModuleCall | None]


class RecordedProgram(Program, Sequence[Entry]):
    """A recorded program. Its parts are created on first access.

    Attributes:
        waiting: number of freed handles that wait for the unsent programs of other threads.
    """

    __setattr__ = object.__setattr__  # programs are frozen

    def __init__(self, packed: bytes, moments: Moments, forward_calls: ForwardCalls) -> None:
        """Read a program from its packed form.

        Args:
            packed: the bytes that the C++ functions `take` and `look` return.
            moments: the module entries of the thread, in order, each with the number of entries before it.
            forward_calls: as in `Recorder`.
        """
        self._packed = packed
        numbers: tuple[int, ...] = _HEADER.unpack_from(packed)
        _, self._length, handles, slots, self.waiting, *self._starts = numbers
        self._size = handles + slots
        self._moments, self._forward_calls = moments, forward_calls
        # When C++ reuses call numbers, `native_calls.calls` becomes another list.
        self._calls_by_number, self._generation = native_calls.calls, native_calls.generation

    def _part(self, number: int) -> Words:
        start = self._starts[number]
        return np.frombuffer(self._packed, np.int64, (self._starts[number + 1] - start) // 8, start)

    def _numbers(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(self._packed, np.int32, self._length, self._starts[number])

    @property
    def size(self) -> int:
        """Return the number of handles plus the number of scalars."""
        return self._size

    @property
    def structure(self) -> bytes:
        """Return a hash of the program's structure: calls, data flow, dying values, and inputs that share a storage."""
        return self._packed[_HASH]

    @property
    def scalars(self) -> tuple[Words, Kinds]:
        """Return the scalars of all entries as arrays."""
        slots = self._part(7)
        return slots, np.frombuffer(self._packed, np.uint8, len(slots), self._starts[8])

    @property
    def call_numbers(self) -> tuple[int, Words]:
        """Return the generation of the call list, and the call numbers."""
        return self._generation, self._numbers(6)  # type: ignore[return-value]

    @property
    def exact(self) -> tuple[int, bytes]:
        """Return a key that is equal for programs with equal calls and scalars."""
        return self._generation, self._packed[self._starts[6] :]

    @property
    def values(self) -> Words:
        """Return the distinct handles, in order of first appearance."""
        return self._part(2)

    @property
    def free(self) -> list[int]:
        """Return the freed handles that no entry mentions."""
        return self._part(4).tolist() if self._starts[4] != self._starts[5] else []

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Return the call of each entry."""
        return native_calls.calls_of(self._calls_by_number, self._numbers(6).tolist())

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """Return the handles of all entries."""
        return tuple(self._part(0).tolist())

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return the scalars of all entries."""
        return decoded_slots(*self.scalars)

    @cached_property
    def dead(self) -> frozenset[int]:
        """Return the handles that die with the entries."""
        dying = self._part(3)
        return frozenset(self.values[dying].tolist()) if len(dying) else frozenset()

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Return the position in the user's code that issued each entry."""
        return tuple([_sites.get(n) or site_of(n) for n in self._numbers(5).tolist()])

    @cached_property
    def modules(self) -> tuple[ModuleCall | None, ...]:
        """Return the module call or autograd node of each entry."""
        count, moments = self._length, [*self._moments.items()]
        modules: list[ModuleCall | None] = []
        ends = [at for at, _ in moments[1:]] + [count]
        for (at, module), end in zip(moments, ends, strict=False):  # there may be none
            modules += [None] * (min(at, count) - len(modules))  # before the first
            modules += [module] * (min(end, count) - len(modules))
        modules += [None] * (count - len(modules))
        if self._starts[1] == self._starts[2]:  # no entry is in a backward pass
            return tuple(modules)
        nodes, calls = self._part(1).tolist(), self._forward_calls
        return tuple(
            [(node, None, calls) if m is None and node != -1 else m for node, m in zip(nodes, modules, strict=True)]
        )

    def call(self, index: int) -> Call:
        """Return the call of one entry; -1 is the last entry."""
        return native_calls.calls_of(self._calls_by_number, [int(self.call_numbers[1][index])])[0]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._entry(i) for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return self._entry(at)

    @cached_property
    def _offsets(self) -> list[tuple[int, int]]:
        handles = accumulate([c.operand_count + c.new_count for c in self.calls], initial=0)
        slots = accumulate([c.slot_count for c in self.calls], initial=0)
        return list(zip(handles, slots, strict=True))

    def _entry(self, index: int) -> Entry:
        (handle, slot), (handle_end, slot_end) = self._offsets[index], self._offsets[index + 1]
        return Entry(
            self.calls[index],
            self.operands[handle:handle_end],
            self.slots[slot:slot_end],
            self.sites[index],
            self.modules[index],
        )
