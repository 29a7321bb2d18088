"""The Mann-Whitney rank test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist


def chance_of_being_less(ours: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of the one-sided Mann-Whitney test for `ours` being less than `other`.

    The p-value is a normal approximation with corrections for ties and continuity. Each sample needs about eight
    values.
    """
    first, second = len(ours), len(other)
    everything = sorted([*ours, *other])
    places: dict[float, float] = {}
    for place, value in enumerate(everything, 1):
        places.setdefault(value, place)
    ties = Counter(everything)
    # Ties share their mean rank.
    ranks = {value: place + (ties[value] - 1) / 2 for value, place in places.items()}
    greater = sum(ranks[value] for value in ours) - first * (first + 1) / 2
    total = first + second
    tied = sum(count**3 - count for count in ties.values()) / (total * (total - 1))
    spread = math.sqrt(first * second / 12 * (total + 1 - tied))
    if not spread:
        return 1.0
    return NormalDist().cdf((greater - first * second / 2 + 0.5) / spread)
