"""Predictions of the lifetimes of values, from earlier programs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import djinn
from djinn.hooks import DataResidency, ExecutionPhase, WorkloadType
from djinn_core.runtime.planning import session_plans

DEVICE = "remote_accelerator:0"


def planned(monkeypatch):
    """Results of all plans that are made from now on, pieces as well."""
    made, real = [], session_plans.plan_program

    def plan_program(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(session_plans, "plan_program", plan_program)
    return made


def kinds(result):
    """Lifetimes of the inputs of a planned program."""
    return {result.profile.residency[v] for v in result.graph.inputs}


@pytest.mark.usefixtures("plan_first_runs")
def test_an_update_whose_gradients_came_from_an_earlier_program(embedded, monkeypatch):
    made = planned(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)
    loss = model(torch.randn(5, 8).to(DEVICE)).square().mean()
    loss.backward()
    loss.item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    djinn.synchronize()
    profile = made[-1].profile
    assert profile.workload is WorkloadType.TRAINING
    assert set(profile.phases) == {ExecutionPhase.TRAINING_OPTIMIZER}
    assert kinds(made[-1]) == {DataResidency.GRADIENT, DataResidency.PERSISTENT_WEIGHT}


@pytest.mark.usefixtures("plan_first_runs")
def test_a_cache_that_is_put_in_another_order_is_still_one(embedded, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3000, **sizes)).eval().to(DEVICE)
    made = planned(monkeypatch)
    with torch.no_grad():
        output = model(torch.arange(2, 14).view(2, 6).to(DEVICE), use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        cache = output.past_key_values
        for _ in range(4):  # from the second step on nothing is analysed: these values no analysis has seen
            djinn.synchronize()
            output = model(token, past_key_values=cache)
        djinn.synchronize()
        planned_before = len(made)
        cache.reorder_cache(torch.tensor([1, 0]).to(DEVICE))
        djinn.synchronize()
    reordered = made[-1]
    assert len(made) == planned_before + 1
    assert {node.operation for node in reordered.graph.nodes} == {"index_select"}
    assert kinds(reordered) == {DataResidency.STATEFUL_KV_CACHE, DataResidency.INPUT}
    assert reordered.profile.phase is ExecutionPhase.LLM_DECODE
