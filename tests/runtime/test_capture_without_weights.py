"""Models without weights: what they are is found out without memory, and without a server."""

from __future__ import annotations

import torch

import djinn
from djinn.hooks import DataResidency, ExecutionPhase, WorkloadType


def test_a_model_on_meta_tensors_is_analysed():
    from transformers import LlamaConfig, LlamaForCausalLM

    # Layers as wide as those of a model of 70 billion parameters, but two of them: six gigabytes, were they there.
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=2, dtype="bfloat16", **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    parameters = sum(p.numel() for p in model.parameters())
    with djinn.capture() as captured, torch.no_grad():
        model.to_empty(device="remote_accelerator:0")
        output = model(torch.zeros(1, 2048, dtype=torch.long))  # it holds the cache
    assert output.logits.shape == (1, 2048, 128256)
    profile = captured.profile
    assert profile.workload is WorkloadType.LLM
    assert profile.phase is ExecutionPhase.LLM_PREFILL
    assert profile.pattern_counts()["attention"] == 2
    weights = [v for v, kind in profile.residency.items() if kind is DataResidency.PERSISTENT_WEIGHT]
    assert sum(captured.graph.meta(v).numel for v in weights) >= parameters
    names = {node.module for node in captured.graph.nodes}
    assert "model.layers.1.self_attn.q_proj" in names
    assert captured.semantic_metadata[-1].module == "lm_head"
