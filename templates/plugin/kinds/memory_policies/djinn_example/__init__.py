"""A memory policy for Djinn: evict the largest values first, so that few values are evicted."""

from __future__ import annotations

from djinn.hooks import EvictionCandidate, MemoryPolicy, hookimpl

djinn_api_version = "2.0"


class ExamplePolicy(MemoryPolicy):
    """Used if `djinn serve --memory-policy example` names it."""

    name = "example"

    def key(self, candidate: EvictionCandidate) -> float:
        """Return a number for a storage. The executor evicts those with the greatest numbers first."""
        return candidate.nbytes


@hookimpl
def djinn_register_memory_policies() -> list[MemoryPolicy]:
    """Return the memory policies of this plugin."""
    return [ExamplePolicy()]
