"""LRU cache: a bounded mapping that evicts the least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(OrderedDict[K, V]):
    """A mapping of at most `capacity` entries, the least recently used first. Not thread-safe.

    `use` and `store` count as uses; plain dict lookups do not. cachetools.LRUCache takes twice as long per hit, and 0.1
    s to import.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def use(self, key: K) -> V | None:
        """Return a value and mark it as most recently used. Return None if the key is missing."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def store(self, key: K, value: V) -> Sequence[V]:
        """Store a value as most recently used. Return the evicted values."""
        self[key] = value
        self.move_to_end(key)
        if len(self) <= self.capacity:
            return ()
        return [self.pop(next(iter(self))) for _ in range(len(self) - self.capacity)]
