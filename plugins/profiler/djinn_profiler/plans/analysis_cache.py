"""Analysis cache of `djinn.plan`, `djinn.explain` and captures, for repeated programs.

It has two levels. The key of a *profile* is the program's fingerprint, its module names, and the plugins with their
versions. The key of a *plan* adds the locations of inputs, the fetched values, and the devices. Plans of programs that
run are keyed by structure, for varying sizes (`runtime/planning/plan_cache.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import msgspec

from djinn_core.system.lru import LruCache

if TYPE_CHECKING:
    from djinn_core.ir.result import PipelineResult


class _HitCounts(msgspec.Struct):
    hits: int = 0
    misses: int = 0


class _Level(LruCache[Hashable, "CachedAnalysis"]):
    """The most recently used entries, with statistics. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.count = _HitCounts()

    def find(self, key: Hashable) -> CachedAnalysis | None:
        entry = self.use(key)
        if entry is None:
            self.count.misses += 1
        else:
            self.count.hits += 1
        return entry


class CachedAnalysis(msgspec.Struct, frozen=True):
    """A cached result, and the value ids of its program in order of first appearance."""

    result: PipelineResult
    values: tuple[int, ...]

    def names(self, values: tuple[int, ...]) -> dict[int, int]:
        """Return for each value id of the cached program the id at the same position of `values`."""
        return dict(zip(self.values, values, strict=True))


class AnalysisCache:
    """A cache of planning results, limited in number. Thread-safe."""

    def __init__(self, capacity: int = 16) -> None:
        """Create a cache of at most `capacity` plans and as many profiles."""
        self._lock = threading.Lock()
        self._profiles = _Level(capacity)
        self._plans = _Level(capacity)

    def find_plan(self, key: Hashable) -> CachedAnalysis | None:
        """Return the cached plan of a key, or None."""
        with self._lock:
            return self._plans.find(key)

    def find_profile(self, key: Hashable) -> CachedAnalysis | None:
        """Return a cached result whose profile has the key, or None."""
        with self._lock:
            return self._profiles.find(key)

    def store(self, profile_key: Hashable, plan_key: Hashable, analysis: CachedAnalysis) -> None:
        """Cache an analysis under both keys, and evict the least recently used analysis if a level is full."""
        with self._lock:
            self._profiles.store(profile_key, analysis)
            self._plans.store(plan_key, analysis)

    def clear(self) -> None:
        """Drop all entries and the statistics."""
        with self._lock:
            self._profiles = _Level(self._profiles.capacity)
            self._plans = _Level(self._plans.capacity)

    def statistics(self) -> Mapping[str, int]:
        """Return hits, misses and entries of both levels."""
        with self._lock:
            return {
                f"{name}_{field}": number
                for name, level in (("plan", self._plans), ("profile", self._profiles))
                for field, number in (
                    ("hits", level.count.hits), ("misses", level.count.misses), ("entries", len(level))
                )
            }  # fmt: skip
