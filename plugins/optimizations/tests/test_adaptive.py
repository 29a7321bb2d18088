"""Decisions of A/B tests from measured runs. Real sessions are tested in `tests/runtime/test_ab_tests.py`."""

from __future__ import annotations

import random

import pytest

from djinn.hooks import Trial
from djinn_optimizations.adaptive import Adaptive
from djinn_optimizations.adaptive.judging import LOOKS
from djinn_optimizations.adaptive.ranks import chance_of_being_less

# --- decisions ------------------------------------------------------------------------------------------------


def run_times(seed, count, factor=1.0):
    """Return run times of a busy machine: most near a millisecond, some several milliseconds."""
    source = random.Random(seed)
    return tuple(factor * 1e-3 * (source.gauss(1, 0.05) + (source.random() < 0.15) * 3) for _ in range(count))


def first_decision(seed, factor):
    """Return the first decision on an optimization that multiplies run times by `factor`."""
    ours, other = run_times(seed, 64, factor), run_times(seed + 1000, 64)
    for count in range(1, 65):
        verdict = Adaptive().pays(Trial("x", ours[:count], other[:count]))
        if verdict is not None:
            return verdict, count
    raise AssertionError("nothing was decided")


def test_adaptive_decides_nothing_after_few_runs():
    assert Adaptive().pays(Trial("x", (1.0, 1.0, 1.0), (0.1, 0.1, 0.1))) is None


def test_slower_optimization_is_disabled():
    verdicts = [first_decision(seed, 1.2)[0] for seed in range(40)]
    assert verdicts.count(False) >= 38


def test_faster_optimization_stays_enabled():
    assert all(first_decision(seed, 0.8)[0] for seed in range(40))


def test_neutral_optimization_is_rarely_disabled():
    assert [first_decision(seed, 1.0)[0] for seed in range(200)].count(False) <= 10


def test_negligible_cost_stays_enabled():
    ours, other = (tuple(seconds + n * 1e-9 for n in range(64)) for seconds in (1.01, 1.0))
    assert Adaptive().pays(Trial("x", ours, other)) is True


def test_clear_gain_ends_trial_early():
    assert first_decision(0, 0.1) == (True, LOOKS[0] // 2) or first_decision(1, 0.1) == (True, LOOKS[0] // 2)


def test_rank_sum_test_equals_textbook():
    # 1 to 8 all below 9 to 16: U = 0, sigma = sqrt(64 * 17 / 12), z = (0.5 - 32) / 9.52
    assert chance_of_being_less(range(1, 9), range(9, 17)) == pytest.approx(0.000469, rel=0.01)
    assert chance_of_being_less([1.0] * 8, [1.0] * 8) == 1.0
    assert chance_of_being_less([3, 1, 2], [2, 3, 1]) == pytest.approx(0.5, abs=0.1)
