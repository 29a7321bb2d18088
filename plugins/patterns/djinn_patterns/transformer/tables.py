"""The pattern `embedding`: look-ups of tokens or ids in a table."""

from __future__ import annotations

from djinn.planning import anything, matcher, op
from djinn_core.planning.matching.match_result import Match


def _shape(match: Match) -> tuple[int, ...]:
    return match.meta("table").shape


EMBEDDING = matcher(
    "embedding",
    op("embedding")(anything("table"))["look_up"],
    confidence=1.0,
    reason=lambda match: (
        f"node {match['look_up'].id} ({match['look_up'].op}) takes rows of a table of {_shape(match)[0]} rows, "
        f"{_shape(match)[1]} numbers each"
    ),
    check=lambda match: len(_shape(match)) == 2,
    hints=lambda match: {"tables": match["look_up"].inputs[:1]},
    details=lambda match: {"rows": _shape(match)[0], "width": _shape(match)[1]},
    tolerates_growth=True,
)
