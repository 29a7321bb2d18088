"""Programs that a policy would divide, on two real executors: tried on one and over both, and a judge decides."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from figures import figures

import djinn
from djinn import hooks
from djinn.hooks import CostModel, hookimpl
from djinn.planning import CostEstimate, OptimizationResult
from djinn.testing import open_session
from djinn_client.runtime import client
from djinn_pool.placement_trials import LOOKS

REMOTE = "remote_accelerator:0"
LAYERS = 4


class ExpensiveProducts(CostModel):
    """A cost model in which products take so long that two branches seem faster on two executors."""

    name = "expensive"
    operations = frozenset()
    tolerates_growth = True

    def estimate(self, graph, node, device):
        del graph, device
        return CostEstimate(0, 0, 0, 0.05 if node.operation in {"linear", "mm", "addmm"} else 1e-6)


class FixedJudge(hooks.Judge):
    """A judge that returns `verdict` once it has seen a run of each placement."""

    name = "judge"
    tolerates_growth = True

    def __init__(self):
        self.verdict, self.trials = None, []

    def optimize(self, context):
        del context
        return OptimizationResult(self.name, applied=False, reason="it only judges")

    def spreads(self, trial):
        self.trials.append(trial)
        return self.verdict


class Plugin:
    """A plugin that registers the cost model and the judge."""

    djinn_api_version = "2.0"

    def __init__(self, judge):
        self.judge = judge

    @hookimpl
    def djinn_register_cost_models(self):
        return [ExpensiveProducts()]

    @hookimpl
    def djinn_register_optimizations(self):
        return [self.judge]


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(LAYERS)]) for _ in range(2)
        )

    def forward(self, one, other):
        return self.left(one) + self.right(other)


@pytest.fixture
def judge():
    return FixedJudge()


@pytest.fixture
def router(judge, request, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no device was measured
    settings = getattr(request, "param", {})
    with configured(plugins=["pool", "cost_based", Plugin(judge)], executors=2, threads=1, **settings):
        djinn.init()
        djinn.reset_stats()
        yield open_session().router


@pytest.fixture
def step(router):
    """Run a step, wait for it, and compare its results with local PyTorch."""
    del router
    torch.manual_seed(0)
    model, given = Branches().eval(), (torch.randn(4, 32), torch.randn(4, 32))
    with torch.no_grad():
        expected = model(*given)
    model.to(REMOTE)
    djinn.synchronize()  # the seed is a program of its own

    @torch.no_grad()
    def run():
        torch.testing.assert_close(model(*(one.to(REMOTE) for one in given)).cpu(), expected)

    run.model, run.given = model, given
    return run


def executors_used(router, run):
    """Return for each executor whether `run` sent it a submission."""
    before = [member.submissions.last_number for member in router.executors.members]
    run()
    return [m.submissions.last_number > number for m, number in zip(router.executors.members, before, strict=True)]


def value_counts(router):
    djinn.synchronize()
    return [figures(member)["values"] for member in router.executors.members]


def trial_counts():
    found = djinn.stats()
    return found["placements_tried"], found["placements_switched_off"]


def test_losing_trial_returns_to_one_executor(router, judge, step):
    assert [executors_used(router, step) for _ in range(2)] == [[True, False]] * 2
    assert trial_counts() == (0, 0)
    assert executors_used(router, step) == [True, True]
    assert trial_counts() == (1, 0)
    judge.verdict = False
    for _ in range(2 * LOOKS[-1]):
        step()
    assert trial_counts() == (1, 1)
    assert executors_used(router, step) == [True, False]
    assert value_counts(router)[1] == 0, "copies of weights are freed when it is decided"
    assert all(trial.policy == "cost_based" and trial.alone and trial.apart for trial in judge.trials)
    assert judge.trials[-1].moving > 0
    made = djinn.stats()["plans_made"]
    step()
    assert djinn.stats()["plans_made"] == made
    with djinn.capture() as captured, torch.no_grad():
        kept = step.model(*(one.to(REMOTE) for one in step.given))
    assert "on one executor by measurement" in str(djinn.explain(captured))
    del kept


def test_winning_trial_stays_divided(router, judge, step):
    judge.verdict = True
    for _ in range(2 * LOOKS[-1]):
        step()
    assert trial_counts() == (1, 0)
    before = sum(figures(member)["peer_bytes"] for member in router.executors.members)
    assert executors_used(router, step) == [True, True]
    moved = sum(figures(member)["peer_bytes"] for member in router.executors.members) - before
    assert moved < 2 * step.given[0].nbytes


def test_unawaited_program_stays_on_one_executor(router, step):
    def run():
        with torch.no_grad():
            step.model(*(one.to(REMOTE) for one in step.given))
        djinn.synchronize()

    run()
    kept = []
    for _ in range(4):  # sent when the next one is, and not waited for
        with torch.no_grad():
            kept.append(step.model(*(one.to(REMOTE) for one in step.given)).to("cpu", non_blocking=True))
    del kept
    assert trial_counts() == (0, 0)
    assert value_counts(router)[1] == 0


@pytest.mark.parametrize("router", [{"placement_policy": "cost_based"}], indirect=True)
def test_named_policy_runs_without_trial(router, judge, step):
    assert [executors_used(router, step) for _ in range(3)] == [[True, True]] * 3
    assert not judge.trials
    assert trial_counts() == (0, 0)


def test_margin_is_learnt_from_run_times(router, step):
    """The predictions here are wrong by a large factor."""
    planner = router._planner
    assert planner.margin == 0.4, "no device was measured"
    planner.calibrated = True
    assert planner.margin == 0.3
    for layers in range(1, 7):
        chain = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)]).to(REMOTE)
        for _ in range(4):
            chain(torch.ones(2, 8).to(REMOTE)).detach().cpu()
    assert planner.margin == 0.4
    assert len(planner.errors.found) >= 5
    with client.record_plans() as plans:
        step()
    assert len(plans) == 2, "divided and in one place"


def test_only_used_executors_are_synchronized(router):
    x = torch.ones(3).to(REMOTE)
    djinn.synchronize()

    def count():
        kept = x + 1
        djinn.synchronize()
        del kept

    count()
    assert executors_used(router, count) == [True, False]
    djinn.synchronize()  # frees what it made
    far = torch.ones(3, device="remote_accelerator:2")
    assert executors_used(router, djinn.synchronize) == [False, True]
    assert executors_used(router, djinn.synchronize) == [False, False]
    assert far.sum().item() == 3


def test_failure_of_divided_program_is_raised_once(router):
    table = torch.ones(3, 2, device="remote_accelerator:2")
    lost = torch.nn.functional.embedding(torch.tensor([7], device="remote_accelerator:2"), table)
    with pytest.raises(djinn.errors.RemoteError):
        djinn.synchronize()
    djinn.synchronize()
    del lost
