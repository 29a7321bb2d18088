"""Predictions of the lifetimes of values, from earlier programs."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import djinn
from djinn.planning import DataResidency, ExecutionPhase, Modality, WorkloadType
from djinn_client.runtime.planning import plan_maker
from djinn_client.runtime.planning.residency_history import ResidencyHistory
from djinn_core.ir.handles import make_handle
from djinn_core.ir.profile import Lineage

DEVICE = "remote_accelerator:0"


def record_plans(monkeypatch):
    """Return a list to which each later plan's result is appended."""
    made, real = [], plan_maker.plan_program

    def plan_program(*args, **kwargs):
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(plan_maker, "plan_program", plan_program)
    return made


def kinds(result):
    """Return the lifetimes of the inputs of a planned program."""
    return {result.profile.residency[v] for v in result.graph.inputs}


@pytest.mark.usefixtures("plans_all")
def test_gradients_of_earlier_program_are_recognised(embedded, monkeypatch):
    made = record_plans(monkeypatch)
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


@pytest.mark.usefixtures("plans_all")
def test_multimodal_fusion_is_recognised_across_programs(embedded, monkeypatch):
    """As in LLaVA's `generate()`, features, embeddings and their fusion are separate programs."""
    see, table, layer = nn.Conv2d(3, 8, 4, 4), nn.Embedding(1000, 8), nn.Linear(8, 8)
    see, table, layer = (module.to(DEVICE) for module in (see, table, layer))
    made = record_plans(monkeypatch)
    with torch.no_grad():
        features = see(torch.randn(1, 3, 8, 8).to(DEVICE)).flatten(2).transpose(1, 2).contiguous()
        features.sum().item()
        tokens = torch.tensor([[5, 99, 99, 99, 99, 7]]).to(DEVICE)
        text, places = table(tokens), (tokens == 99)[..., None].expand(1, 6, 8)
        text.sum().item()
        met = text.masked_scatter(places, features)
        output = layer(met)
        output.sum().item()
    seen, read, fused = (result.profile for result in made)
    assert set(seen.phases) == {ExecutionPhase.VISION_ENCODING}
    assert set(read.phases) == {ExecutionPhase.FORWARD}
    assert set(fused.phases) == {ExecutionPhase.MULTIMODAL_FUSION}
    assert set(fused.modalities) == {Modality.MULTIMODAL_FUSION}


def test_lifetime_outweighs_view_contents():
    cache, recent, plan = make_handle(5, 0), deque(maxlen=1), object()
    history, view = ResidencyHistory(recent), cache + 1
    program = SimpleNamespace(
        operands=[view, cache], dead=set(), instructions=lambda: [SimpleNamespace(outputs=[view])]
    )
    history.note_plan(plan, program, {cache: DataResidency.STATEFUL_KV_CACHE}, [Lineage.TEXT])
    recent.append((plan, program))
    assert history.residency(SimpleNamespace(operands=[cache])) == {cache: DataResidency.STATEFUL_KV_CACHE}


@pytest.mark.usefixtures("plans_all")
def test_reordered_kv_cache_is_recognised(embedded, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3000, **sizes)).eval().to(DEVICE)
    made = record_plans(monkeypatch)
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
