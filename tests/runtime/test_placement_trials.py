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
    MAX_MARGIN,
    PRIOR,
    UNMEASURED,
    PlacementTrials,
    PredictionErrors,
    TriedPlacement,
    margin_of,
)

EMPTY = Program((), (), ())


@attrs.define
class SimulatedProgram:
    """A program with fixed times on one executor and on several. The first run of each placement is not measured."""

    alone: float
    apart: float
    moving: float = 0.0
    waited_for: bool = True
    stats: Stats = attrs.field(factory=Stats)
    verdicts: Verdicts = attrs.field(factory=Verdicts)
    tried: TriedPlacement | None = None

    def runs(self, count):
        """Return for each run whether it used several executors."""
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
    simulated = SimulatedProgram(alone=1.0, apart=0.6)
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
    simulated = SimulatedProgram(alone=1.0, apart=1.4)
    ways = simulated.runs(100)
    assert sum(ways[4:]) <= len(LOOKS), "looked at now and then"
    assert not any(ways[60:])
    assert simulated.tried.settled
    assert simulated.stats.placements_switched_off == 1
    assert "1e+03 ms on one, 1.4e+03 ms over several" in simulated.verdicts.switched_off(EMPTY)["policy"]


def test_equal_times_choose_one_executor():
    assert not any(SimulatedProgram(alone=1.0, apart=0.99).runs(100)[60:])


def test_trial_counts_moving_cost():
    assert any(SimulatedProgram(alone=1.0, apart=0.6, moving=3.0).runs(100)[60:])
    assert not any(SimulatedProgram(alone=1.0, apart=0.6, moving=4.0).runs(100)[60:])


def test_no_placement_trial_without_measurements():
    assert not any(SimulatedProgram(alone=1.0, apart=0.1, waited_for=False).runs(100))


def test_trial_of_unmeasurable_placement_ends():
    simulated = SimulatedProgram(alone=1.0, apart=0.1)
    simulated.runs(2)
    trials = PlacementTrials(Adaptive(), "policy", simulated.stats, simulated.verdicts)
    assert [trials.choose(simulated.tried) for _ in range(UNMEASURED + 2)] == [True] * UNMEASURED + [False] * 2


def test_single_slow_run_does_not_decide():
    """The first measured run on one executor is disturbed. Several executors seem faster until the next measurement."""
    simulated = SimulatedProgram(alone=1.0, apart=1.2)
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
    """The placements are equally fast, and single runs vary by up to 20%."""
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


def test_judge_among_returns_first_judge():
    judge = Adaptive()
    assert judge_among([DeadCode(), judge]) is judge
    assert judge_among([DeadCode()]) is None


# --- margins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("calibrated", "prior"), [(True, PRIOR), (False, MAX_MARGIN)])
def test_initial_prediction_margin_is_prior(calibrated, prior):
    assert margin_of([0.01] * (ENOUGH - 1), calibrated=calibrated) == prior


def test_prediction_margin_covers_most_predictions():
    assert margin_of([0.15] * 9 + [3.0], calibrated=False) == 0.15
    assert margin_of([0.01] * 10, calibrated=True) == 0.1
    assert margin_of([3.0] * 10, calibrated=True) == MAX_MARGIN


class FakeTemplate:
    """A fake of a prepared template."""

    took = None


def test_first_run_is_not_a_prediction_error():
    errors, plan = PredictionErrors(), FakeTemplate()
    errors.watch(plan, predicted=0.015)
    for seconds in (1.0, 0.010, 0.010):
        plan.note_seconds(seconds)
    assert list(errors.found) == [pytest.approx(0.5)]
    assert plan.note_seconds is None, "nothing is done in later runs"


def test_short_programs_are_not_measured():
    errors, plan = PredictionErrors(), FakeTemplate()
    errors.watch(plan, predicted=1e-5)
    for _ in range(3):
        plan.note_seconds(2e-4)
    assert not errors.found
