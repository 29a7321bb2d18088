"""Entries of a program: columns in C++, read as a sequence of `Entry`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, overload

import torch

from djinn_client.interception.native.calls import calls, decoded_slots, list_of, signature_ids
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.entry import Entry
from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Call, Program, Site, Slot

ENTRIES, EPOCH, LIMIT, DIFFERENTIATING, WATCHED, NODE = range(6)  # counters of a program
UNTOLD, FORGOTTEN = -4, -3  # values of `NODE` that are no autograd node

_sites: Final[dict[int, Site]] = {}
_next_site = 0
_learning = threading.RLock()
_NOWHERE: Final[Site] = ((lambda: None).__code__, 0)


def site_of(number: int) -> Site:
    """The place in the user's code with a number of C++."""
    if number < 0:
        return _NOWHERE
    found = _sites.get(number)
    if found is None:
        with _learning:
            _learn_sites()
        found = _sites.get(number, _NOWHERE)  # C++ keeps the last some thousand code objects
    return found


def begin_in_child() -> None:
    """In a forked child: a thread that stayed in the parent may have held the lock."""
    global _learning
    _learning = threading.RLock()


def _learn_sites() -> None:
    global _next_site
    first, *new = ops.sites_from(_next_site)
    for number in [number for number in _sites if number < first]:
        del _sites[number]
    _next_site = max(_next_site, first)
    for code, offset in zip(new[::2], new[1::2], strict=True):
        held = ctypes.cast(code, ctypes.py_object)
        _sites[_next_site] = held.value, offset
        ctypes.pythonapi.Py_DecRef(held)  # the reference that C++ gave away
        _next_site += 1


class Entries(Sequence[Entry]):
    """Entries that were taken or looked at. An `Entry` is made when it is asked for.

    Attributes:
        calls: one per entry. numbers: of these, in C++. handles: of all entries in one tuple. slots: likewise.
        modules: one per entry.
    """

    def __init__(self, columns: Sequence[torch.Tensor], modules: Sequence[ModuleCall | None]) -> None:
        """`columns`: what `take` and `look` of C++ return."""
        self._columns = columns
        self.numbers: list[int] = list_of(columns[0])
        # At once, because C++ may use a number again. The rest is read at the first access.
        self.calls: tuple[Call, ...] = tuple([calls[n] for n in self.numbers])  # type: ignore[misc]
        self.modules = tuple(modules)
        self._rest: tuple[tuple[int, ...], tuple[Slot, ...]] | None = None
        self._starts: list[tuple[int, int, int]] | None = (
            None  # first handle and first slot of each entry, and its site
        )

    def _read(self) -> tuple[tuple[int, ...], tuple[Slot, ...]]:
        found = self._rest
        if found is None:
            _, handles, bits, kinds, _, _ = self._columns
            found = self._rest = tuple(list_of(handles)), decoded_slots(bits, kinds)
        return found

    @property
    def handles(self) -> tuple[int, ...]:
        """Handles of all entries."""
        return self._read()[0]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Scalars of all entries."""
        return self._read()[1]

    def __len__(self) -> int:
        return len(self.numbers)

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

    def _entry(self, index: int) -> Entry:
        starts = self._starts
        if starts is None:
            handles = accumulate([c.operand_count + c.new_count for c in self.calls], initial=0)
            slots = accumulate([c.slot_count for c in self.calls], initial=0)
            sites = [*list_of(self._columns[4]), -1]
            starts = self._starts = list(zip(handles, slots, sites, strict=True))
        (handle, slot, site), (handle_end, slot_end, _) = starts[index], starts[index + 1]
        return Entry(
            self.calls[index],
            self.handles[handle:handle_end],
            self.slots[slot:slot_end],
            site_of(site),
            self.modules[index],
        )

    @property
    def signatures(self) -> tuple[int, ...]:
        """Identities of the signatures, one per entry."""
        return tuple([signature_ids[n] for n in self.numbers])

    def program(self, dead: Sequence[int]) -> Program:
        """A frozen program of these entries; handles in `dead` that it mentions die with it."""
        handles, slots = self._read()
        inside = frozenset(dead).intersection(handles) if dead else frozenset()
        sites = [_sites.get(n) or site_of(n) for n in list_of(self._columns[4])]
        return Program(self.calls, handles, slots, inside, tuple(sites), self.modules)


class UnsentEntries(Sequence[Entry]):
    """The unsent entries of a program, which stay in C++."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __len__(self) -> int:
        return int(self._recorder.counters[ENTRIES])

    def look(self, first: int = 0) -> Entries:
        """The entries from `first` on."""
        return self._recorder.look(first)  # type: ignore[no-any-return]

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            found = self.look(first)
            return found if step == 1 and last - first >= len(found) else found[: max(0, last - first) : step]
        at = index + len(self) if index < 0 else index
        return self.look(at)[0]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.look())

    @property
    def signatures(self) -> tuple[int, ...]:
        """Identities of the signatures, one per entry."""
        return tuple([signature_ids[n] for n in ops.look_calls(self._recorder.program)])

    def __add__(self, others: Sequence[Entry]) -> list[Entry]:
        return [*self, *others]
