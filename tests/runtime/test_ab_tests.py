"""An optimization that costs time is switched off in a real session; how runs take turns, and what is told of it."""

from __future__ import annotations

import pytest
import torch

import djinn
import djinn_optimizations.adaptive
from djinn import hooks
from djinn.hooks import Optimization, hookimpl
from djinn.planning import OptimizationResult, Rewrite, Substitution, arguments
from djinn_client.runtime import client
from djinn_client.runtime.planning import ab_tests

REMOTE = "remote_accelerator:0"


class SlowerLinear(Optimization):
    """An optimization that computes each `linear` sixteen times. It is correct and slow."""

    name = "slower"
    tolerates_growth = True

    def optimize(self, context):
        found = []
        for number in context.plan.nodes:
            node = context.graph.nodes[number]
            if node.operation == "linear":
                given = arguments(node)
                values = (given["input"], given["weight"], given["bias"])
                found.append(Substitution(frozenset({number}), values, node.outputs, self.slowly))
        if not found:
            return OptimizationResult(self.name, applied=False, reason="there is no product")
        return OptimizationResult(
            self.name, True, "products are done sixteen times", Rewrite(substitutions=tuple(found))
        )

    @staticmethod
    def slowly(tensors):
        data, weight, bias = tensors
        results = [torch.nn.functional.linear(data * factor, weight, bias) for factor in range(16)]
        return [results[1] + 0 * sum(results)]


class FixedJudge(hooks.Judge):
    """A judge that returns `verdict` once it has three runs of each variant."""

    name = "judge"
    tolerates_growth = True

    def __init__(self, verdict):
        self.verdict = verdict
        self.trials = []

    def optimize(self, context):
        del context
        return OptimizationResult(self.name, applied=False, reason="it only judges")

    def pays(self, trial):
        self.trials.append(trial)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict if min(len(trial.with_it), len(trial.without)) >= 3 else None


class OptimizationPlugin:
    """A plugin that registers optimizations."""

    djinn_api_version = "2.0"

    def __init__(self, *optimizations):
        self.optimizations = optimizations

    @hookimpl
    def djinn_register_optimizations(self):
        return list(self.optimizations)


@pytest.fixture
def session(monkeypatch):
    """Return a function that opens an inline session with these plugins, which tries optimizations at once."""
    monkeypatch.setattr(ab_tests, "PLANNING_PAYBACK", 0)
    for name in ("DJINN_SERVERS", "DJINN_CONNECTION_FILE"):
        monkeypatch.delenv(name, raising=False)

    def begin(*plugins):
        djinn.shut_down()
        djinn.configure(plugins=plugins, executor="inline")
        djinn.init()
        djinn.reset_stats()

    yield begin
    djinn.shut_down()
    djinn.configure()


@torch.no_grad()
def layer_and_data():
    torch.manual_seed(0)
    layer, data = torch.nn.Linear(128, 128), torch.randn(64, 128)
    expected = layer(data)
    there, given = layer.to(REMOTE), data.to(REMOTE)

    @torch.no_grad()
    def step():
        torch.testing.assert_close(there(given).cpu(), expected)

    return step, there, given


def trial_counts():
    found = djinn.stats()
    return found["optimizations_tried"], found["optimizations_switched_off"]


@torch.no_grad()
def test_weight_only_result_runs_with_its_program(session):
    session(OptimizationPlugin(SlowerLinear()))
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(16, 8), torch.nn.Parameter(torch.randn(4, 16))
    data = torch.randn(3, 16)
    expected = [layer(rows), torch.nn.functional.linear(data, rows)]
    there, rows_there, given = layer.to(REMOTE), torch.nn.Parameter(rows.to(REMOTE)), data.to(REMOTE)
    for _ in range(4):  # also when the plan is known, and `rows` was recognised as a weight
        results = [there(rows_there), torch.nn.functional.linear(given, rows_there, torch.zeros(4, device=REMOTE))]
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result.cpu(), wanted)


def test_slower_optimization_is_switched_off(session):
    session(djinn_optimizations.adaptive, OptimizationPlugin(SlowerLinear()))
    step, *_ = layer_and_data()
    for _ in range(ab_tests.MIN_RUNS + 4 * ab_tests.MAX_RUNS_PER_ARM):
        step()
        if trial_counts()[1]:
            break
    assert trial_counts() == (1, 1)


def test_trial_alternates_runs_until_verdict(session):
    judge = FixedJudge(verdict=False)
    session(OptimizationPlugin(SlowerLinear(), judge))
    step, there, given = layer_and_data()
    for _ in range(ab_tests.MIN_RUNS + 1):
        step()
    assert trial_counts() == (0, 0)
    for _ in range(2 * (ab_tests.WARMUP_RUNS + 3) + 2):
        step()
    assert trial_counts() == (1, 1)
    assert {t.optimization for t in judge.trials} == {"slower"}
    assert all(abs(len(t.with_it) - len(t.without)) <= 1 for t in judge.trials), "in turns"
    before = djinn.stats()["instructions_sent"]
    step()
    assert djinn.stats()["instructions_sent"] - before <= 2
    with djinn.capture() as captured, torch.no_grad():
        kept = there(given)
    assert "slower not applied: switched off by measurement" in str(djinn.explain(captured)), kept


def test_faster_optimization_stays(session):
    session(OptimizationPlugin(SlowerLinear(), FixedJudge(verdict=True)))
    step, there, given = layer_and_data()
    with client.record_plans() as plans:
        for _ in range(3 * ab_tests.MIN_RUNS):
            step()
        assert trial_counts() == (1, 0)
        made = djinn.stats()["plans_made"]
        for _ in range(3):
            step()
        assert djinn.stats()["plans_made"] == made
    with djinn.capture() as captured, torch.no_grad():
        kept = there(given)
    (measured,) = {plan.trial_times["slower"] for plan in plans if plan.trial_times}
    applied = next(line for line in str(djinn.explain(captured)).splitlines() if "slower applied" in line)
    assert applied.endswith(f"({measured.runs} runs each)"), kept


@pytest.mark.parametrize("verdict", [ValueError("oops"), "yes"])
def test_failing_judge_is_named_and_keeps_the_plan(session, caplog, verdict):
    session(OptimizationPlugin(SlowerLinear(), FixedJudge(verdict)))
    step, *_ = layer_and_data()
    for _ in range(3 * ab_tests.MIN_RUNS):
        step()
    assert trial_counts() == (1, 0)
    failed = [r for r in caplog.records if "a plugin failed" in r.getMessage()]
    assert len(failed) == 1
    assert "optimization 'judge'" in failed[0].getMessage() + str(vars(failed[0]))


def test_optimization_is_not_tried_without_judge(session):
    session(OptimizationPlugin(SlowerLinear()))
    step, *_ = layer_and_data()
    for _ in range(2 * ab_tests.MIN_RUNS):
        step()
    assert trial_counts() == (0, 0)
