"""The memory policy `lru`: the least recently used values are evicted first."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import EvictionCandidate, MemoryPolicy, hookimpl

__all__ = ["LeastRecentlyUsed", "djinn_api_version", "djinn_register_memory_policies"]

djinn_api_version = "2.0"


class LeastRecentlyUsed(MemoryPolicy):
    """Evicts in order of last use. Uses that are foreseen do not count."""

    name = "lru"

    def key(self, candidate: EvictionCandidate) -> float:
        """Steps since the last use."""
        return candidate.last_use


@hookimpl
def djinn_register_memory_policies() -> Iterable[MemoryPolicy]:
    """The memory policy `lru`."""
    return [LeastRecentlyUsed()]
