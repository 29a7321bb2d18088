"""The stages on programs that a real executor runs: generation and training as users write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import djinn
from djinn_client.runtime.client import record_plans
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, ExecutionPhase, WorkloadType

DEVICE = "remote_accelerator:0"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 3000,
}


def language_model(name, implementation):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "attn_implementation": implementation}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=3000, **ends)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, **ends)).eval()


@pytest.mark.parametrize(
    ("name", "implementation", "cache"),
    [
        ("gpt2", "eager", "dynamic"),
        ("gpt2", "sdpa", "dynamic"),
        ("llama", "eager", "dynamic"),
        ("llama", "sdpa", "static"),
    ],
)
def test_generation_is_annotated_as_prefill_and_decode(name, implementation, cache):
    model, prompt = language_model(name, implementation), torch.arange(3, 9)[None]
    choices = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = model.generate(prompt, **choices)
    model.to(DEVICE)
    torch.remote_accelerator.synchronize()  # what others recorded and did not wait for
    with record_plans() as results:
        tokens = model.generate(prompt.to(DEVICE), **choices).cpu()
    assert torch.equal(tokens, expected)
    steps = [r.profile for r in results if r.profile.workload is WorkloadType.LLM]
    assert [p.phase for p in steps[:2]] == [ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE]
    assert {p.phase for p in steps[1:]} == {ExecutionPhase.LLM_DECODE}
    for profile in steps:
        counts = profile.pattern_counts()
        assert (counts["attention"], counts["kv_cache"]) == (2, 2)
        caches = [r for r in profile.residency.values() if r is DataResidency.STATEFUL_KV_CACHE]
        assert len(caches) >= 4
    assert all(r.profile.workload is WorkloadType.GENERIC for r in results if r.profile not in steps)


def test_recorded_training_is_recognised_and_optimized_exactly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    x, y = torch.rand(8, 1, 8, 8), torch.arange(8)
    here = losses(model, x, y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).to(
        DEVICE
    )
    with record_plans() as results:
        there = losses(model, x.to(DEVICE), y.to(DEVICE))
    assert there == pytest.approx(here, rel=1e-4)
    training = [r for r in results if r.profile.workload is WorkloadType.TRAINING]
    assert training
    residency = set().union(*(r.profile.residency.values() for r in training))
    assert {DataResidency.PERSISTENT_WEIGHT, DataResidency.OPTIMIZER_STATE} <= residency


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (torch.optim.AdamW, 2),
        (lambda weight_storages: torch.optim.AdamW(weight_storages, fused=True), 3),  # its counters are on the device
        (lambda weight_storages: torch.optim.SGD(weight_storages, lr=0.1, momentum=0.9), 1),
    ],
)
def test_first_step_results_are_optimizer_state(optimizer, states):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("meta")
    weight_storages = list(model.parameters())
    made = optimizer(weight_storages)
    with djinn.capture() as captured:
        model(torch.rand(5, 8, device="meta")).square().mean().backward()
        made.step()
    storages = {
        kind: {storage_of(v) for v, k in captured.profile.residency.items() if k is kind} for kind in DataResidency
    }
    assert len(storages[DataResidency.OPTIMIZER_STATE]) == states * len(weight_storages)
    assert len(storages[DataResidency.GRADIENT]) == len(weight_storages)


def losses(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_recorded_and_exported_models_have_equal_annotations():
    from djinn.planning import fx_graph
    from djinn_core.planning.stages.annotate import annotate

    model, tokens = language_model("gpt2", "sdpa"), torch.arange(6)[None]

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens, use_cache=False).logits

    with torch.no_grad():
        exported = fx_graph(torch.export.export(Logits(), (tokens,)))
        remote = language_model("gpt2", "sdpa").to(DEVICE)
        with record_plans() as results:
            remote(tokens.to(DEVICE), use_cache=False).logits.cpu()
    recorded = max(results, key=lambda r: len(r.graph.nodes)).profile
    other = annotate(exported, djinn_patterns())
    for profile in (recorded, other):
        assert profile.workload is WorkloadType.LLM
        assert profile.pattern_counts()["attention"] == 2
        assert [m.details["causal"] for m in profile.patterns if m.pattern == "attention"] == [True, True]
    # A sync point in the middle of the model cuts what was recorded, so its weights are in more than one program.
    assert len(weight_storages(*(r.profile for r in results))) == len(weight_storages(other))


def weight_storages(*profiles):
    """Return the storages of all weights."""
    return {storage_of(v) for p in profiles for v, r in p.residency.items() if r is DataResidency.PERSISTENT_WEIGHT}


def djinn_patterns():
    from djinn_client.runtime.client import registry

    assert djinn.compat.is_initialized()
    return registry().patterns
