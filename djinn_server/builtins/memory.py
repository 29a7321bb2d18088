"""The built-in memory policy `next_use`: Belady's rule."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.hookspecs import hookimpl
from djinn_server.hookspecs.memory_policies import EvictionCandidate, MemoryPolicy

djinn_api_version = "2.0"


class NextUsePolicy(MemoryPolicy):
    """Evicts first the storage whose next use is furthest away.

    If the next use is unknown, its distance is taken to equal that of the last use.
    """

    name = "next_use"

    def key(self, candidate: EvictionCandidate) -> float:
        """Return the number of steps until the next use."""
        return candidate.last_use if candidate.next_use is None else candidate.next_use


@hookimpl
def djinn_register_memory_policies() -> Iterable[MemoryPolicy]:
    """Return the memory policy `next_use`."""
    return [NextUsePolicy()]
