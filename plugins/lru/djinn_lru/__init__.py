"""The memory policy `lru`: the least recently used values are evicted first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import EvictionContext, MemoryPolicy, hookimpl

__all__ = ["LeastRecentlyUsed", "djinn_api_version", "djinn_register_memory_policies"]

djinn_api_version = "2.0"


class LeastRecentlyUsed(MemoryPolicy):
    """Evicts in order of last use, whatever the values are and whatever will use them."""

    name = "lru"

    def order(self, context: EvictionContext) -> Sequence[int]:
        """The longest unused first; of those that were used at the same step the oldest first."""
        candidates = context.candidates
        return sorted(range(len(candidates)), key=lambda i: (-candidates[i].last_use, candidates[i].serial))


@hookimpl
def djinn_register_memory_policies() -> Iterable[MemoryPolicy]:
    """The memory policy `lru`."""
    return [LeastRecentlyUsed()]
