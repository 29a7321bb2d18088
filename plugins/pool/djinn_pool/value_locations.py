"""Locations of values: the executor that has the memory of each, and those that hold copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from djinn_core.ir.handles import storage_of, storages_of

Made = tuple[tuple[int, int, int], ...]  # by new value: its position among those of a run, its executor, its bytes
Where = tuple[tuple[int | None, ...], tuple[frozenset[int] | None, ...]]


@attrs.define
class ValueLocations:
    """Table of the locations of values and copies; executors are numbered from 0.

    Attributes:
        homes: by storage the executor that has its memory, and where writes to it happen.
        given: storages of which it was the client who gave the content.
        held: by executor the bytes of all memory there, copies included, as far as sizes were told.
    """

    homes: dict[int, int] = attrs.field(factory=dict)
    given: set[int] = attrs.field(factory=set)
    held: Counter[int] = attrs.field(factory=Counter)
    _sizes: dict[int, int] = attrs.field(factory=dict)  # by storage
    _values: dict[int, set[int]] = attrs.field(factory=dict)  # by storage, which values look into it
    _copies: dict[int, dict[int, frozenset[int]]] = attrs.field(factory=dict)

    def of(self, values: Iterable[int]) -> Where:
        """Homes and copies of values, to compare with; None if there are none."""
        values = tuple(values)
        homes = tuple(map(self.homes.get, storages_of(values)))
        return homes, tuple(map(self.copies, values)) if self._copies else ()

    def copies(self, value: int) -> frozenset[int] | None:
        """The executors that hold a copy of a value."""
        alike = self._copies.get(storage_of(value))
        return alike.get(value) if alike is not None else None

    def size(self, storage: int) -> int:
        """Bytes of a storage, as far as they were told."""
        return self._sizes.get(storage, 0)

    def add(self, value: int, executor: int, nbytes: int = 0) -> None:
        """There is a new value, whose memory is there; `nbytes` of it are as many as it looks into."""
        self.add_all((value,), ((0, executor, nbytes),))

    def add_all(self, values: Sequence[int], made: Made) -> None:
        """As `add`, for all that a program made: `values` are those of its run. Without a call for each, as submissions are waited for."""
        homes, sizes, alike, held = self.homes, self._sizes, self._values, self.held
        new = [values[position] for position, _, _ in made]
        for value, storage, (_, executor, nbytes) in zip(new, storages_of(new), made, strict=True):
            if storage not in alike:
                homes[storage], sizes[storage], alike[storage] = executor, nbytes, {value}
                held[executor] += nbytes
                continue
            alike[storage].add(value)
            if homes[storage] != executor:
                self._rehome(storage, executor)
            if nbytes > sizes[storage]:
                self._grow(storage, nbytes)

    def _rehome(self, storage: int, executor: int) -> None:
        size = self._sizes[storage]
        self.held[self.homes[storage]] -= size
        self.held[executor] += size
        self.homes[storage] = executor

    def _grow(self, storage: int, nbytes: int) -> None:
        more = nbytes - self._sizes[storage]
        self._sizes[storage] = nbytes
        copies = [e for holders in self._copies.get(storage, {}).values() for e in holders]
        for executor in (self.homes[storage], *copies):
            self.held[executor] += more

    def move(self, value: int, executor: int) -> None:
        """The memory of a value is there now; a copy of it that was there is a copy no more."""
        storage = storage_of(value)
        self._rehome(storage, executor)
        for handle, holders in list(self._copies.get(storage, {}).items()):
            self._keep(handle, holders - {executor})

    def copy(self, value: int, executors: Iterable[int]) -> None:
        """These executors hold a copy of a value, too."""
        self._keep(value, (self.copies(value) or frozenset()) | frozenset(executors))

    def drop(self, value: int, executor: int) -> None:
        """That executor's copy is gone."""
        self._keep(value, (self.copies(value) or frozenset()) - {executor})

    def end_copies(self, values: Iterable[int]) -> list[tuple[int, int]]:
        """The memory of values was written: copies of all that look into it, as value and executor, are out of date and forgotten."""
        ended: list[tuple[int, int]] = []
        for storage in storages_of(values) if self._copies else ():
            copies = [(value, e) for value, holders in self._copies.pop(storage, {}).items() for e in sorted(holders)]
            for _, executor in copies:
                self.held[executor] -= self.size(storage)
            ended += copies
        return ended

    def forget(self, values: Iterable[int]) -> dict[int, list[int]]:
        """Forget values that the program holds no more; return them by the executors that have them. Other values may share their memory.

        Values that were never added, such as those that were made while a program was rewritten, are unknown here. As `add_all`, it makes
        no call for each.
        """
        homes, sizes, looking, held, given = self.homes, self._sizes, self._values, self.held, self.given
        copies = self._copies
        found: dict[int, list[int]] = {}
        values = tuple(values)
        for value, storage in zip(values, storages_of(values), strict=True):
            if storage in copies:
                self._forget_copies(value, found)
            if storage not in looking or value not in (alike := looking[storage]):
                continue
            home = homes[storage]
            alike.remove(value)
            if not alike:
                held[home] -= sizes[storage]
                del looking[storage], homes[storage], sizes[storage]
                if storage in given:
                    given.remove(storage)
            if home in found:
                found[home].append(value)
            else:
                found[home] = [value]
        return found

    def _forget_copies(self, value: int, found: dict[int, list[int]]) -> None:
        for executor in self.copies(value) or ():
            found.setdefault(executor, []).append(value)
        self._keep(value, frozenset())

    def values_in(self, storage: int) -> list[int]:
        """The values that look into a storage."""
        return sorted(self._values[storage])

    def leave(self, executor: int) -> None:
        """An executor is there no more, which is no value's home; its copies are gone."""
        for alike in list(self._copies.values()):
            for value, holders in list(alike.items()):
                self._keep(value, holders - {executor})
        del self.held[executor]

    def held_of(self, storages: Iterable[int]) -> Counter[int]:
        """By executor the bytes of these storages there, copies included."""
        found: Counter[int] = Counter()
        for storage in storages:
            copies = (e for holders in self._copies.get(storage, {}).values() for e in holders)
            home = self.homes.get(storage)
            for executor in (*copies, *(() if home is None else (home,))):
                found[executor] += self.size(storage)
        return found

    def _keep(self, value: int, holders: frozenset[int]) -> None:
        storage = storage_of(value)
        before = self.copies(value) or frozenset()
        for executor in holders - before:
            self.held[executor] += self.size(storage)
        for executor in before - holders:
            self.held[executor] -= self.size(storage)
        if holders:
            self._copies.setdefault(storage, {})[value] = holders
        elif (alike := self._copies.get(storage)) is not None:
            alike.pop(value, None)
            if not alike:
                del self._copies[storage]
