"""Locations of values: the executor that holds a value's memory, and the executors that hold copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from djinn_core.ir.handles import storage_of, storages_of

Made = tuple[tuple[int, int, int], ...]  # for each new value: its position in the run, its executor, its bytes
Where = tuple[tuple[int | None, ...], tuple[frozenset[int] | None, ...]]


@attrs.define
class ValueLocations:
    """Table of the locations of values and copies. Executors are numbered from 0.

    Attributes:
        homes: by storage, the executor that holds its memory and runs the ops that write into it.
        given: storages whose contents the client has uploaded.
        held: known bytes of all memory in use, by executor, including copies.
    """

    homes: dict[int, int] = attrs.field(factory=dict)
    given: set[int] = attrs.field(factory=set)
    held: Counter[int] = attrs.field(factory=Counter)
    _sizes: dict[int, int] = attrs.field(factory=dict)  # by storage
    _values: dict[int, set[int]] = attrs.field(factory=dict)  # by storage, the values that share its memory
    _copies: dict[int, dict[int, frozenset[int]]] = attrs.field(factory=dict)

    def of(self, values: Iterable[int]) -> Where:
        """Return the homes and copies of values as one comparable value."""
        values = tuple(values)
        homes = tuple(map(self.homes.get, storages_of(values)))
        return homes, tuple(map(self.copies, values)) if self._copies else ()

    def copies(self, value: int) -> frozenset[int] | None:
        """Return the executors that hold a copy of a value, or None if it has no copies."""
        alike = self._copies.get(storage_of(value))
        return alike.get(value) if alike is not None else None

    def size(self, storage: int) -> int:
        """Return the known bytes of a storage."""
        return self._sizes.get(storage, 0)

    def add(self, value: int, executor: int, nbytes: int = 0) -> None:
        """Add a new value on an executor. `nbytes`: bytes of its storage that the value spans."""
        self.add_all((value,), ((0, executor, nbytes),))

    def add_all(self, values: Sequence[int], made: Made) -> None:
        """Add all results of a program. `values`: handles of its run.

        There is no call per value, because submissions wait for this method.
        """
        homes, sizes, alike, held_bytes = self.homes, self._sizes, self._values, self.held
        new = [values[position] for position, _, _ in made]
        for value, storage, (_, executor, nbytes) in zip(new, storages_of(new), made, strict=True):
            if storage not in alike:
                homes[storage], sizes[storage], alike[storage] = executor, nbytes, {value}
                held_bytes[executor] += nbytes
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
        growth = nbytes - self._sizes[storage]
        self._sizes[storage] = nbytes
        copies = [e for holders in self._copies.get(storage, {}).values() for e in holders]
        for executor in (self.homes[storage], *copies):
            self.held[executor] += growth

    def move(self, value: int, executor: int) -> None:
        """Record that the memory of a value moved to an executor. A copy on that executor becomes the home."""
        storage = storage_of(value)
        self._rehome(storage, executor)
        for handle, holders in list(self._copies.get(storage, {}).items()):
            self._set_copies(handle, holders - {executor})

    def copy(self, value: int, executors: Iterable[int]) -> None:
        """Record that these executors also hold a copy of a value."""
        self._set_copies(value, (self.copies(value) or frozenset()) | frozenset(executors))

    def drop(self, value: int, executor: int) -> None:
        """Remove the record of an executor's copy."""
        self._set_copies(value, (self.copies(value) or frozenset()) - {executor})

    def end_copies(self, values: Iterable[int]) -> list[tuple[int, int]]:
        """Forget all copies of the storages of `values`. Return these copies as pairs of value and executor."""
        ended_copies: list[tuple[int, int]] = []
        for storage in storages_of(values) if self._copies else ():
            copies = [(value, e) for value, holders in self._copies.pop(storage, {}).items() for e in sorted(holders)]
            for _, executor in copies:
                self.held[executor] -= self.size(storage)
            ended_copies += copies
        return ended_copies

    def forget(self, values: Iterable[int]) -> dict[int, list[int]]:
        """Remove values that the user's program has freed. Return the removed values by the executors that hold them.

        Other values may share their memory. Values that were never added, such as values of a rewritten program, are
        ignored. The loop makes no call per value, because submissions wait for this method.
        """
        homes, sizes, looking, held_bytes, uploaded_storages = (
            self.homes,
            self._sizes,
            self._values,
            self.held,
            self.given,
        )
        copies = self._copies
        by_executor: dict[int, list[int]] = {}
        values = tuple(values)
        for value, storage in zip(values, storages_of(values), strict=True):
            if storage in copies:
                self._forget_copies(value, by_executor)
            if storage not in looking or value not in (alike := looking[storage]):
                continue
            home = homes[storage]
            alike.remove(value)
            if not alike:
                held_bytes[home] -= sizes[storage]
                del looking[storage], homes[storage], sizes[storage]
                if storage in uploaded_storages:
                    uploaded_storages.remove(storage)
            if home in by_executor:
                by_executor[home].append(value)
            else:
                by_executor[home] = [value]
        return by_executor

    def _forget_copies(self, value: int, values_by_executor: dict[int, list[int]]) -> None:
        for executor in self.copies(value) or ():
            values_by_executor.setdefault(executor, []).append(value)
        self._set_copies(value, frozenset())

    def values_in(self, storage: int) -> list[int]:
        """Return the values that share a storage."""
        return sorted(self._values[storage])

    def leave(self, executor: int) -> None:
        """Remove an executor with its copies. It must be the home of no value."""
        for alike in list(self._copies.values()):
            for value, holders in list(alike.items()):
                self._set_copies(value, holders - {executor})
        del self.held[executor]

    def held_of(self, storages: Iterable[int]) -> Counter[int]:
        """Return the bytes of these storages by executor, including copies."""
        bytes_by_executor: Counter[int] = Counter()
        for storage in storages:
            copies = (e for holders in self._copies.get(storage, {}).values() for e in holders)
            home = self.homes.get(storage)
            for executor in (*copies, *(() if home is None else (home,))):
                bytes_by_executor[executor] += self.size(storage)
        return bytes_by_executor

    def _set_copies(self, value: int, holders: frozenset[int]) -> None:
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
