"""The Mann-Whitney rank test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist


def chance_of_being_less(sample: Sequence[float], other_sample: Sequence[float]) -> float:
    """Return the p-value of the one-sided Mann-Whitney test that values in `sample` are less than values in `other_sample`.

    The p-value is a normal approximation with corrections for ties and continuity. Each argument needs about eight
    values.
    """
    sample_count, other_count = len(sample), len(other_sample)
    pooled = sorted([*sample, *other_sample])
    first_ranks: dict[float, float] = {}
    for rank, value in enumerate(pooled, 1):
        first_ranks.setdefault(value, rank)
    ties = Counter(pooled)
    # Ties share their mean rank.
    ranks = {value: rank + (ties[value] - 1) / 2 for value, rank in first_ranks.items()}
    u_statistic = sum(ranks[value] for value in sample) - sample_count * (sample_count + 1) / 2
    total = sample_count + other_count
    tie_correction = sum(count**3 - count for count in ties.values()) / (total * (total - 1))
    deviation = math.sqrt(sample_count * other_count / 12 * (total + 1 - tie_correction))
    if not deviation:
        return 1.0
    return NormalDist().cdf((u_statistic - sample_count * other_count / 2 + 0.5) / deviation)
