"""The built-in memory policy `next_use`: Belady's rule, with the kinds of values where no use can be foreseen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.memory_policies import EvictionCandidate, EvictionContext, MemoryPolicy
from djinn_core.ir.profile import DataResidency

djinn_api_version = "2.0"

_CACHE: Final = DataResidency.STATEFUL_KV_CACHE
# Kinds of values, all else being equal the first goes last.
_KEPT: Final = (
    _CACHE,
    DataResidency.PERSISTENT_WEIGHT,
    DataResidency.OPTIMIZER_STATE,
    DataResidency.EPHEMERAL_ACTIVATION,
)
# Levels: caches of idle sessions go first, then their other values, then all others; caches in use go last.
_IDLE_CACHE, _IDLE, _USUAL, _PINNED = 3, 2, 1, 0
_NEVER: Final = 1 << 62  # steps


class NextUsePolicy(MemoryPolicy):
    """Evicts first the value whose next use is furthest away.

    Values of idle sessions go before all others, and KV caches in use last. Values whose next use cannot be foreseen go by
    kind: first those that hold more than their share, then activations, optimizer states, weights and caches.
    """

    name = "next_use"

    def order(self, context: EvictionContext) -> Sequence[int]:
        """Positions of the candidates by level, next use, share, kind, number of sessions and age; the newest first."""
        keys = [_key(candidate) for candidate in context.candidates]
        return sorted(range(len(keys)), key=keys.__getitem__, reverse=True)


def _key(candidate: EvictionCandidate) -> tuple[int, int, bool, bool, int, int, int]:
    session, kind, ahead = candidate.session, candidate.residency, candidate.next_use
    cache, usual = (_IDLE_CACHE, _IDLE) if session.idle else (_PINNED, _USUAL)
    return (
        cache if kind is _CACHE else usual,
        _NEVER if ahead is None else ahead,
        candidate.outlives,
        kind in session.over_share,
        _KEPT.index(kind),
        -candidate.sessions,
        candidate.serial,
    )


@hookimpl
def djinn_register_memory_policies() -> Iterable[MemoryPolicy]:
    """The memory policy `next_use`."""
    return [NextUsePolicy()]
