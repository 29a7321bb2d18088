"""Parts of transformers as PyTorch, its autograd and its exporters write them; similar graphs are not matched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
import djinn_patterns.transformer
from djinn.planning import fx_graph

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
            result.float().sum().backward()
    return captured.graph


def export_graph(model, *inputs, train=False):
    with torch.no_grad():
        return fx_graph(torch.export.export(model.eval(), inputs))


class GatedMlp(nn.Module):
    def __init__(self, width=8, together=False):
        super().__init__()
        self.up = nn.Linear(width, 4 * width if together else 2 * width, bias=False)
        self.gate = None if together else nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1) if self.gate is None else (self.up(x), self.gate(x))
        return self.down(F.silu(gate) * up)


class ExplicitMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3.0)))))


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        spread = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(spread + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward network, sequential or parallel."""

    def __init__(self, beside=False, eager=False):
        super().__init__()
        self.beside, self.eager = beside, eager
        self.before, self.after = RmsNorm(), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.network = GatedMlp()

    def attend(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = (q @ k.mT).softmax(-1) @ v if self.eager else F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        normed = self.before(x)
        if self.beside:
            return x + self.attend(normed) + self.network(normed)
        x = x + self.attend(normed)
        return x + self.network(self.after(x))


class LanguageModel(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(**how) for _ in range(3))
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def random_input(*shape):
    return torch.randn(*shape)


READ = [record_graph, export_graph]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    ("network", "layers"),
    [
        (GatedMlp(), 3),
        (GatedMlp(together=True), 2),
        (ExplicitMlp(), 2),
        (nn.Sequential(nn.Linear(8, 16), nn.GLU(), nn.Linear(8, 8)), 2),
        (
            nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 8)),
            3,
        ),
    ],
)
def test_feed_forward_networks_match(read, network, layers):
    (match,) = match_graph("mlp", read(network, random_input(2, 3, 8)))
    assert match.details["layers"] == layers


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)),
    ],
)
def test_linear_layers_without_activation_are_not_matched(other):
    assert match_graph("mlp", record_graph(other, random_input(2, 3, 8))) == []


def test_mlp_match_continues_past_inner_norm():
    class NormWithinMlp(nn.Module):
        def __init__(self, bends):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), RmsNorm()
            self.norm.weight, self.bends = nn.Parameter(torch.ones(16)), bends

        def forward(self, x):
            up = self.up(x)
            return self.down(self.norm(up.relu() if self.bends else up))

    graph = record_graph(NormWithinMlp(bends=True), random_input(2, 4, 8))
    (match,) = match_graph("mlp", graph)
    assert "rsqrt" in {graph.nodes[i].operation for i in match.nodes}
    assert not match_graph("mlp", record_graph(NormWithinMlp(bends=False), random_input(2, 4, 8)))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_mlps_and_embeddings_of_language_model_match(train, beside, eager):
    graph = record_graph(LanguageModel(beside=beside, eager=eager), torch.arange(12).view(2, 6), train=train)
    tables = match_graph("embedding", graph)
    assert [m.details["rows"] for m in tables] == [50, 16]
    assert [graph.meta(v).shape[0] for m in tables for v in m.hints["tables"]] == [50, 16]
    assert len(match_graph("mlp", graph)) == 3


def test_time_embedding_match_ends_before_layers():
    class TimeConditioned(nn.Module):
        """Stages with a time embedding and attention."""

        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
            self.told = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x, time):
            time = F.silu(self.time(time))
            for told, block in zip(self.told, self.blocks, strict=True):
                x = block(x + told(time)[:, None])
            return x

    graph = record_graph(TimeConditioned(), random_input(2, 3, 8), random_input(2, 8))
    assert len(match_graph("mlp", graph)) == 3, "the time's network ends before the layers that it tells the time"


def test_mlps_match_in_each_generation_step():
    class GreedyLoop(LanguageModel):
        def forward(self, tokens):
            for _ in range(2):
                tokens = torch.cat([tokens, super().forward(tokens)[:, -1:].argmax(-1)], dim=1)
            return tokens

    graph = record_graph(GreedyLoop(), torch.arange(6).view(1, 6))
    assert len(match_graph("mlp", graph)) == 6
