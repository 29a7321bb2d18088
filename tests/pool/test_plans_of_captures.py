"""`djinn.plan` in a session over several executors: as the program would run now."""

from __future__ import annotations

import torch

import djinn
from djinn.testing import open_session
from djinn_core.ir.handles import storage_of

REMOTE = "remote_accelerator:0"


def linears():
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)]).to(REMOTE)


def plan_linears(model):
    with djinn.capture() as captured, torch.no_grad():
        kept = model(torch.zeros(2, 32))
    result = djinn.plan(captured, until="place")
    del kept
    return result


def test_capture_is_planned_for_all_executors(make_pool):
    with make_pool("balanced"):
        result = plan_linears(linears())
    assert result.placement.policy == "balanced"
    assert {decision.device[0] for decision in result.placement.decisions} == {"0", "1"}
    assert result.schedule is None


def test_capture_plan_follows_weights(make_pool):
    with make_pool("round_robin"), torch.no_grad():
        model = linears()
        model(torch.zeros(2, 32, device=REMOTE)).sum().item()
        router = open_session().router
        homes = [router.home(storage_of(weight.remote.handle)) for weight in model.parameters()]
        sent = djinn.stats()["submissions"]
        result = plan_linears(model)
        assert djinn.stats()["submissions"] == sent
        placed = [int(result.placement.values[weight.remote.handle][0]) for weight in model.parameters()]
    assert set(homes) == {0, 1}
    assert placed == homes
