"""The pattern `embedding`: look-ups of tokens or ids in a table."""

from __future__ import annotations

from djinn.planning import anything, matcher, op
from djinn_core.planning.matching.match_result import Match


def _shape(found: Match) -> tuple[int, ...]:
    return found.meta("table").shape


EMBEDDING = matcher(
    "embedding",
    op("embedding")(anything("table"))["look_up"],
    confidence=1.0,
    reason=lambda found: (
        f"node {found['look_up'].id} ({found['look_up'].op}) takes rows of a table of {_shape(found)[0]} rows, "
        f"{_shape(found)[1]} numbers each"
    ),
    check=lambda found: len(_shape(found)) == 2,
    hints=lambda found: {"tables": found["look_up"].inputs[:1]},
    details=lambda found: {"rows": _shape(found)[0], "width": _shape(found)[1]},
    tolerates_growth=True,
)
