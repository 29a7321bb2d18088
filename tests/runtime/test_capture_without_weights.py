"""Models without weights: what they are is found out without memory, without a server, and without changing them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import djinn
from djinn.planning import DataResidency, ExecutionPhase, WorkloadType
from djinn_client.interception.recording.recorder import recorders


class MixedModel(nn.Module):
    """A model with tied weights, views of them, written buffers, a recurrent layer, and a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        x, _ = self.recurrent(x)
        x, _ = self.attention(x, x, x)
        self.seen += x.sum((0, 1)).detach()
        positions = torch.arange(6, device=self.scale.device, dtype=self.scale.dtype)
        return (x * self.scale + positions) @ self.table.weight[:, :6].T


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> djinn.planning.Graph:
    with djinn.capture() as captured:
        tokens = torch.zeros(2, 5, dtype=torch.long)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert captured.profile.workload is WorkloadType.TRAINING
    return captured.graph


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_meta_training_step_equals_real(make) -> None:
    with torch.device("meta"):
        model = MixedModel()
    optimizer = make(model.parameters(), lr=0.1)
    graph = training_step(model, optimizer)
    real = MixedModel().to("remote_accelerator:0")
    same = training_step(real, make(real.parameters(), lr=0.1))
    assert [n.op for n in graph.nodes] == [n.op for n in same.nodes]
    assert (graph.topology_hash, graph.shape_hash) == (same.topology_hash, same.shape_hash)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert [p.grad for p in model.parameters() if p.grad is not None] == []
    assert optimizer.param_groups[0]["params"][0] is model.scale
    assert not optimizer.state
    assert model.seen.is_meta


def refusal_of(work: Callable[[], object]) -> str:
    try:
        work()
    except djinn.errors.UnsupportedOperation as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("embedded")
@torch.no_grad()  # or else `real` would hold on to itself, as it does on every device
def test_meta_data_access_raises() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    with djinn.capture() as captured:
        real = torch.ones(3)
        nothing = layer(real)
        both = real + 1
        assert both.sum().item() == 6  # asked for inside the capture
    assert captured.graph.by_op["linear"]
    assert "..." in repr(nothing)
    assert "on the meta device" in refusal_of(nothing.cpu)
    assert "on the meta device" in refusal_of((nothing + both).sum().item)
    real += nothing
    assert "on the meta device" in refusal_of(real.tolist)
    assert both.tolist() == [2.0, 2.0, 2.0]
    del nothing, real
    djinn.synchronize()
    assert (both + 1).tolist() == [3.0, 3.0, 3.0]
    gc.collect()  # the errors hold on to what they were raised at
    djinn.synchronize()
    assert not recorders.meta_only.storages


def test_large_meta_model_is_analysed() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    # As wide as one of 70 billion parameters, and with a layer less than three: six gigabytes, were they there.
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=2, dtype="bfloat16", **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    parameters = sum(p.numel() for p in model.parameters())
    with djinn.capture() as captured, torch.no_grad():
        output = model(tokens)  # it holds the cache
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


@pytest.mark.usefixtures("embedded")
def test_meta_tensors_keep_own_semantics() -> None:
    with torch.device("meta"):
        weight = nn.Parameter(torch.ones(3))
    with djinn.capture() as captured, torch.no_grad():
        assert weight.data.device.type == "remote_accelerator"
        assert (weight.data + 1).shape == copy.deepcopy(weight).shape
        assert weight.untyped_storage().nbytes() == 12
        with pytest.raises(djinn.errors.UnsupportedOperation, match="on the meta device"):
            weight.tolist()
        weight.data = torch.zeros(3)
        assert weight.tolist() == [0.0, 0.0, 0.0]
        here = torch.ones(2, device="cpu")
        assert (here.tolist(), here.data.numpy().sum()) == ([1.0, 1.0], 2.0)
    assert weight.is_meta
    assert captured.graph.by_op["zeros"]


def test_meta_model_moves_inside_capture() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    with djinn.capture() as captured:
        layer.to_empty(device="remote_accelerator:0")
        made = layer(torch.ones(3))
    assert layer.weight.device.type == "remote_accelerator"
    assert made.shape == (3,)
    assert sum(len(nodes) for op, nodes in captured.graph.by_op.items() if op.startswith("empty")) == 2
