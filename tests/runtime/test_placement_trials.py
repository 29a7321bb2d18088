"""Choice of the next way to run a program, on one executor or over several, and margins from errors of predictions."""

from __future__ import annotations

import random

import attrs
import pytest

from djinn_client.runtime.planning.ab_tests import Verdicts
from djinn_client.runtime.planning.plan_maker import judge_among
from djinn_client.runtime.stats import Stats
from djinn_core.ir.program import Program
from djinn_optimizations.adaptive import Adaptive
from djinn_optimizations.cleanup import DeadCode
from djinn_pool.placement_trials import (
    ENOUGH,
    LOOKS,
    MOST,
    PRIOR,
    UNMEASURED,
    PlacementTrials,
    PredictionErrors,
    TriedPlacement,
    margin_of,
)

EMPTY = Program((), (), ())


@attrs.define
class Simulated:
    """A program that takes so long on one executor and over several; the first run of each way is not measured, as plans are new."""

    alone: float
    apart: float
    moving: float = 0.0
    waited_for: bool = True
    stats: Stats = attrs.field(factory=Stats)
    verdicts: Verdicts = attrs.field(factory=Verdicts)
    tried: TriedPlacement | None = None

    def runs(self, count):
        """By run whether it was over several executors."""
        trials = PlacementTrials(Adaptive(), "policy", self.stats, self.verdicts)
        self.tried, ways = TriedPlacement(EMPTY, 0, self.moving), []
        for _ in range(count):
            apart = trials.choose(self.tried)
            clock = self.tried.clock(apart=apart)
            if clock is not None and apart in ways and self.waited_for:
                clock(self.apart if apart else self.alone)
            ways.append(apart)
        return ways


def test_faster_division_wins_after_five_runs():
    simulated = Simulated(alone=1.0, apart=0.6)
    ways = simulated.runs(100)
    assert ways[:2] == [False, False]
    assert ways[2:5] == [True, True, True]
    assert sum(ways[5:]) >= 100 - 5 - len(LOOKS)
    assert simulated.tried.settled
    assert (simulated.stats.placements_tried, simulated.stats.placements_switched_off) == (1, 0)
    assert not simulated.verdicts.switched_off(EMPTY)
    measured = simulated.verdicts.measured(EMPTY)["policy"]
    assert (measured.before, measured.after) == (1.0, 0.6)


def test_slower_division_loses_after_five_runs():
    simulated = Simulated(alone=1.0, apart=1.4)
    ways = simulated.runs(100)
    assert sum(ways[4:]) <= len(LOOKS), "looked at now and then"
    assert not any(ways[60:])
    assert simulated.tried.settled
    assert simulated.stats.placements_switched_off == 1
    assert "1e+03 ms on one, 1.4e+03 ms over several" in simulated.verdicts.switched_off(EMPTY)["policy"]


def test_equal_times_choose_one_executor():
    assert not any(Simulated(alone=1.0, apart=0.99).runs(100)[60:])


def test_moving_cost_counts():
    assert any(Simulated(alone=1.0, apart=0.6, moving=3.0).runs(100)[60:])
    assert not any(Simulated(alone=1.0, apart=0.6, moving=4.0).runs(100)[60:])


def test_no_trial_without_measurements():
    assert not any(Simulated(alone=1.0, apart=0.1, waited_for=False).runs(100))


def test_unmeasurable_way_is_given_up():
    simulated = Simulated(alone=1.0, apart=0.1)
    simulated.runs(2)
    trials = PlacementTrials(Adaptive(), "policy", simulated.stats, simulated.verdicts)
    assert [trials.choose(simulated.tried) for _ in range(UNMEASURED + 2)] == [True] * UNMEASURED + [False] * 2


def test_single_slow_run_does_not_decide():
    """The first measured run on one executor was disturbed: several look better until one executor is looked at again."""
    simulated = Simulated(alone=1.0, apart=1.2)
    trials = PlacementTrials(Adaptive(), "policy", simulated.stats, simulated.verdicts)
    tried = TriedPlacement(EMPTY, 0)
    tried.alone.record_seconds(3.0)
    ways = []
    for _ in range(80):
        ways.append(apart := trials.choose(tried))
        if (clock := tried.clock(apart=apart)) is not None:
            clock(1.2 if apart else 1.0)
    assert ways[0]
    assert not any(ways[-20:])


def test_noisy_equal_times_choose_one_executor():
    """A busy machine: neither way is faster, and single runs take up to a fifth more or less."""
    wrong = 0
    for seed in range(200):
        noise = random.Random(seed)
        trials = PlacementTrials(Adaptive(), "policy", Stats(), Verdicts())
        tried = TriedPlacement(EMPTY, 0)
        for _ in range(80):
            apart = trials.choose(tried)
            if (clock := tried.clock(apart=apart)) is not None:
                clock(noise.uniform(0.8, 1.2))
        wrong += apart
    assert wrong < 200 / 4


def test_judge_among_returns_the_first_judge():
    judge = Adaptive()
    assert judge_among([DeadCode(), judge]) is judge
    assert judge_among([DeadCode()]) is None


# --- margins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calibrated", "prior"), [(True, PRIOR), (False, MOST)])
def test_initial_margin_is_prior(calibrated, prior):
    assert margin_of([0.01] * (ENOUGH - 1), calibrated=calibrated) == prior


def test_margin_covers_most_predictions():
    assert margin_of([0.15] * 9 + [3.0], calibrated=False) == 0.15
    assert margin_of([0.01] * 10, calibrated=True) == 0.1
    assert margin_of([3.0] * 10, calibrated=True) == MOST


class Timed:
    """Stands for a prepared template."""

    took = None


def test_first_run_is_not_a_prediction_error():
    errors, plan = PredictionErrors(), Timed()
    errors.watch(plan, predicted=0.015)
    for seconds in (1.0, 0.010, 0.010):
        plan.note_seconds(seconds)
    assert list(errors.found) == [pytest.approx(0.5)]
    assert plan.note_seconds is None, "nothing is done in later runs"


def test_short_programs_are_not_measured():
    errors, plan = PredictionErrors(), Timed()
    errors.watch(plan, predicted=1e-5)
    for _ in range(3):
        plan.note_seconds(2e-4)
    assert not errors.found
