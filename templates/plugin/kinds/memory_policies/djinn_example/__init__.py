"""A memory policy for Djinn: the largest values are evicted first, so that few have to go."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.hooks import EvictionCandidate, EvictionContext, MemoryPolicy, hookimpl

djinn_api_version = 1


class ExamplePolicy:
    """Used where `djinn serve --memory-policy example` names it."""

    name = "example"

    def order(self, context: EvictionContext) -> Sequence[int]:
        """Positions of all candidates: the first is evicted first."""
        candidates = context.candidates
        return sorted(range(len(candidates)), key=lambda position: -candidates[position].nbytes)

    def recompute(self, candidate: EvictionCandidate) -> bool:
        """True if it is recomputed at its next use instead of spilled."""
        return candidate.recompute_seconds is not None and candidate.recompute_seconds < candidate.restore_seconds


@hookimpl
def djinn_register_memory_policies() -> list[MemoryPolicy]:
    """The memory policies that this plugin offers."""
    return [ExamplePolicy()]
