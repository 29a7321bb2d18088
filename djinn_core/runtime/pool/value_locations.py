"""Locations of values: the executor that has the memory of each, and those that hold copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from djinn_core.ir.values import storage_of, storages_of

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
        storage = storage_of(value)
        self.homes[storage] = executor
        known = self._sizes.get(storage, 0)
        if nbytes > known:
            self._sizes[storage] = nbytes
            self.held[executor] += nbytes - known
            for holders in self._copies[storage].values() if storage in self._copies else ():
                for holder in holders:
                    self.held[holder] += nbytes - known
        values = self._values.get(storage)
        if values is None:
            self._values[storage] = {value}
        else:
            values.add(value)

    def move(self, value: int, executor: int) -> None:
        """The memory of a value is there now; a copy of it that was there is a copy no more."""
        storage = storage_of(value)
        self.held[self.homes.get(storage, executor)] -= self.size(storage)
        self.held[executor] += self.size(storage)
        self.homes[storage] = executor
        for handle, holders in list(self._copies.get(storage, {}).items()):
            self._keep(handle, holders - {executor})

    def copy(self, value: int, executors: Iterable[int]) -> None:
        """These executors hold a copy of a value, too."""
        self._keep(value, (self.copies(value) or frozenset()) | frozenset(executors))

    def drop(self, value: int, executor: int) -> None:
        """That executor's copy is gone."""
        self._keep(value, (self.copies(value) or frozenset()) - {executor})

    def end_copies(self, storage: int) -> list[tuple[int, int]]:
        """The storage was written: its copies, as value and executor, are out of date and forgotten."""
        ended = [(value, e) for value, holders in self._copies.pop(storage, {}).items() for e in sorted(holders)]
        for _, executor in ended:
            self.held[executor] -= self.size(storage)
        return ended

    def forget(self, value: int) -> list[int]:
        """Forget a value that the program holds no more; return the executors that have it. Other values may share its memory.

        Values that were never added, such as those that were made while a program was rewritten, are unknown here.
        """
        storage = storage_of(value)
        holders: frozenset[int] | None = None
        if storage in self._copies:
            holders = self.copies(value)
            self._keep(value, frozenset())
        values = self._values.get(storage)
        if values is None or value not in values:
            return sorted(holders or ())
        home = self.homes[storage]
        if len(values) > 1:
            values.remove(value)
        else:
            del self._values[storage], self.homes[storage]
            self.held[home] -= self._sizes.pop(storage, 0)
            self.given.discard(storage)
        return sorted(holders | {home}) if holders else [home]

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
