"""Programs for which several executors should pay, on the simulated clock; and the rule for what is on by default."""

from __future__ import annotations

import pytest

from djinn_profiler.plans.cluster_plan import planning_plugins
from evaluation.ablation.run_ablation import Compared, Figures, verdicts
from evaluation.ablation.scenarios import SCENARIOS, measure

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def plugins():
    return planning_plugins()


@pytest.mark.parametrize(
    ("name", "least", "does"),
    [
        ("CNN, a stream of batches", 1.9, "pipelining"),
        ("multimodal branches", 1.55, "cost_based on 2"),
        ("recomputation, 400 Gbit/s", 1.6, "as written"),
    ],
)
def test_two_devices_are_faster_than_one(name, least, does, plugins):
    row = measure(BY_NAME[name], plugins)
    assert row.gain >= least
    assert does in row.how


def test_slow_link_favours_recomputation(plugins):
    row = measure(BY_NAME["recomputation, 1 Gbit/s"], plugins)
    assert "recomputation" in row.how
    assert row.two_ms < 0.1 * row.other_ms
    assert row.two_bytes < 0.02 * row.other_bytes


def test_large_tables_stay_in_place(plugins):
    row = measure(BY_NAME["recommender tables, 104 GB"], plugins)
    assert row.one_ms is None
    assert row.two_bytes < 0.001 * row.other_bytes


def comparison_row(part, before, after):
    return Compared("program", "one", part, Figures(after, 0, 0, 8), Figures(before, 0, 0, 10))


@pytest.mark.parametrize(
    ("times", "on"),
    [
        (((10, 8), (10, 8), (10, 10)), True),
        (((10, 8), (10, 10)), False),  # it gains in half, not in more
        (((10, 8), (10, 8), (10, 10.3)), False),  # it costs more than 2 % in one
        (((10, 9.5), (10, 9.5)), False),
    ],
)
def test_default_rule_decides_by_measured_times(times, on):
    (row,) = verdicts([comparison_row("part", *pair) for pair in times])
    assert row.acts == len(times)
    assert row.by_default is on
    assert row.launches == pytest.approx(-0.2)
