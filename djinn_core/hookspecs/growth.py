"""Growth: plans serve programs of other sizes where all objects that had a part in them say that they may."""

from __future__ import annotations

from typing import Protocol


class GrowthTolerant(Protocol):
    """Optional member of the objects of stages 2 to 6, which may leave it out.

    Attributes:
        tolerates_growth: whether the object says the same for sizes and whole numbers of the same class (8 to 127, 128 to 2047,
            and so on by sixteens; smaller ones are distinguished), and whatever other numbers are, but for their sign. Where an
            object that is asked lacks it, everything counts exactly.
    """

    tolerates_growth: bool


def tolerates_growth(item: object) -> bool:
    """True if an object says that it tolerates growth."""
    return bool(getattr(item, "tolerates_growth", False))
