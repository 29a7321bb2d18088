"""Programs that are sent in pieces stay what they were as wholes."""

from __future__ import annotations

import torch

import djinn
from djinn.planning import DataResidency, ExecutionPhase, WorkloadType
from djinn_client.interception.recording import program_prediction
from djinn_client.runtime.planning import plan_maker

DEVICE = "remote_accelerator:0"


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=3000, num_key_value_heads=2, **sizes)).eval()


def test_a_loop_keeps_its_profile_when_it_is_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(program_prediction, "MIN_REPEATS", 2)
    model, prompt = language_model().to(DEVICE), torch.arange(3, 9)[None].to(DEVICE)
    annotated, pieces = [], []
    monkeypatch.setattr("djinn_core.planning.pipeline.annotate", counted(annotated, "djinn_core.planning.pipeline"))
    real = plan_maker.plan_program

    def planned(*args, make, **kwargs):
        result = real(*args, make=make, **kwargs)
        if make.keywords["profile"] is not None:
            pieces.append(result)
        return result

    monkeypatch.setattr(plan_maker, "plan_program", planned)
    generate(model, prompt, 12)
    profile = djinn.last_profile()
    assert profile.workload is WorkloadType.LLM
    assert profile.phase is ExecutionPhase.LLM_DECODE
    assert profile.pattern_counts()["attention"] == profile.pattern_counts()["kv_cache"] == 3
    assert pieces, "nothing was sent in pieces"
    caches = {r for p in pieces for r in p.profile.residency.values()}
    assert DataResidency.STATEFUL_KV_CACHE in caches
    for result in pieces:
        assert result.profile.workload is WorkloadType.LLM
        assert len(result.profile.phases) == len(result.graph.nodes)
        known = {v for n in result.graph.nodes for v in (*n.inputs, *n.outputs)}
        assert set(result.profile.residency) <= known
        assert all(0 <= n < len(result.graph.nodes) for m in result.profile.patterns for n in m.nodes)
    for _ in range(8):  # by then the prefill is sent in pieces as well
        generate(model, prompt, 12)
    annotated.clear()
    made = djinn.stats()["plans_made"]
    generate(model, prompt, 12)
    assert djinn.stats()["plans_made"] == made, "the steady state plans nothing"
    assert annotated == [], "the steady state analyses nothing"
    assert djinn.last_profile().phase is ExecutionPhase.LLM_DECODE


def counted(calls, module):
    import importlib

    real = importlib.import_module(module).annotate

    def annotate(graph, *args, **kwargs):
        calls.append(len(graph.nodes))
        return real(graph, *args, **kwargs)

    return annotate


def generate(model, prompt, count):
    return model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0).cpu()
