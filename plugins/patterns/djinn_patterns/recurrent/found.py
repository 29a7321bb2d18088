"""Intermediate finding: a recurrence with the ops that take part."""

from __future__ import annotations

import attrs


@attrs.frozen
class Recurrence:
    """One recurrence.

    Attributes:
        nodes: ids of the ops that take part.
        kind: `lstm`, `gru`, `rnn`, `linear` (what is kept does not decide what is forgotten) or `loop` (anything else).
        form: `op` (one op does it all), `steps` (one after the other), `scan` (all positions at once).
        steps: how many steps are seen; None if the op does not say so.
        confidence, reason: as in `PatternMatch`.
        layers: how many layers one op holds. bidirectional: whether it goes both ways.
    """

    nodes: frozenset[int]
    kind: str
    form: str
    steps: int | None
    confidence: float
    reason: str
    layers: int = 1
    bidirectional: bool = False
