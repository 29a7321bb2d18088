"""Graphs that resemble a part of a transformer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
import djinn_patterns.transformer

DEVICE = "remote_accelerator:0"
PATTERNS = {pattern.name: pattern for pattern in djinn_patterns.transformer.djinn_register_patterns()}


def match_graph(name, graph):
    pattern = PATTERNS[name]
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def record_graph(model, *inputs, train=False):
    model = copy.deepcopy(model).train(train).to(DEVICE)
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        result = model(*[i.to(DEVICE) for i in inputs])
        if train:
            result.sum().backward()
    return captured.graph


def random_input(*shape):
    return torch.randn(*shape)


class WindowAttention(nn.Module):
    """Attention over windows. A network computes the position biases."""

    def __init__(self, eager):
        super().__init__()
        self.eager = eager
        self.network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2, bias=False))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("places", torch.randn(9, 2))
        self.register_buffer("pairs", torch.arange(16) % 9)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in self.layers)
        bias = 16 * torch.sigmoid(self.network(self.places)[self.pairs].view(4, 4, 2).permute(2, 0, 1))
        if self.eager:
            return torch.softmax(q @ k.mT * 0.5 + bias, -1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(len(x), -1, -1, -1).contiguous())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_scoring_network_is_not_mlp(train, eager):
    assert match_graph("mlp", record_graph(WindowAttention(eager), random_input(3, 4, 8), train=train)) == []


def test_mlp_with_softmax_result_matches():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(-1))
    assert len(match_graph("mlp", record_graph(model, random_input(3, 8)))) == 1
