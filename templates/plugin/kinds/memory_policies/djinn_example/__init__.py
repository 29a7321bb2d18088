"""A memory policy for Djinn: evict the largest values first, so that few values are evicted."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.hooks import EvictionContext, MemoryPolicy, hookimpl

djinn_api_version = "2.0"


class ExamplePolicy(MemoryPolicy):
    """Used if `djinn serve --memory-policy example` names it."""

    name = "example"

    def order(self, context: EvictionContext) -> Sequence[int]:
        """Return the positions of all candidates. The executor evicts the first one first."""
        sizes = [candidate.nbytes for candidate in context.candidates]
        return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)


@hookimpl
def djinn_register_memory_policies() -> list[MemoryPolicy]:
    """Return the memory policies of this plugin."""
    return [ExamplePolicy()]
