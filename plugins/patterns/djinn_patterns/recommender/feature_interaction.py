"""A place where features meet, as a value."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn_patterns.recommender.features import Features


@attrs.frozen
class FeatureInteraction:
    """A place where features meet.

    Attributes:
        kind: `dot`, `pairs`, `factorisation`, `cross`, `mask`, `product`, `towers`, `distance` or `attention`.
        at: id of the op in which they meet. nodes: ids of the ops that belong to it, in order.
        features: sources of what meets. tables: how many look-ups lead there.
    """

    kind: str
    at: int
    nodes: tuple[int, ...]
    features: tuple[int, ...]
    tables: int


def told(kind: str, found: Features, nodes: Iterable[int], at: int, *sources: int) -> FeatureInteraction:
    """The interaction of `sources` in the op `at`, with what else belongs to it."""
    leads = 0
    for source in sources:
        leads |= found.of(source)
    return FeatureInteraction(kind, at, tuple(sorted({*nodes, at})), tuple(dict.fromkeys(sources)), leads.bit_count())
