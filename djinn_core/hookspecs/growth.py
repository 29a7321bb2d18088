"""Growth: a plan is used for programs of other sizes if all objects that took part in it allow that."""

from __future__ import annotations

from typing import Protocol


class GrowthTolerant(Protocol):
    """Optional member of the objects of stages 2 to 6, which may leave it out.

    Attributes:
        tolerates_growth: True if the object decides the same for programs that differ in sizes only, such as the length of a sequence
            or of a cache. If all objects that are asked have it, a plan serves sizes up to 16 times as large or as small as those
            that it was made for; otherwise up to 4 times (`runtime/planning/size_range.py`).
    """

    tolerates_growth: bool


def tolerates_growth(item: object) -> bool:
    """True if an object says that it tolerates growth."""
    return bool(getattr(item, "tolerates_growth", False))
