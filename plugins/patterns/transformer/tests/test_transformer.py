"""What transformers are made of is found as PyTorch, its autograd and its exporters write it, and nothing that only looks like it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
import djinn_transformer
from djinn.fx import fx_graph
from djinn.testing import PatternConformance, PluginConformance

DEVICE = "remote_accelerator:0"
PATTERNS = {pattern.name: pattern for pattern in djinn_transformer.djinn_register_patterns()}


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_transformer


class TestPatterns(PatternConformance):
    @pytest.fixture(params=sorted(PATTERNS))
    def pattern(self, request):
        return PATTERNS[request.param]


def found_in(name, graph):
    pattern = PATTERNS[name]
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def recorded(model, *inputs, train=False):
    model = copy.deepcopy(model).train(train).to(DEVICE)
    with djinn.capture() as captured, torch.set_grad_enabled(train):
        result = model(*[i.to(DEVICE) for i in inputs])
        if train:
            result.float().sum().backward()
    return captured.graph


def exported(model, *inputs, train=False):
    with torch.no_grad():
        return fx_graph(torch.export.export(model.eval(), inputs))


class Gated(nn.Module):
    def __init__(self, width=8, together=False):
        super().__init__()
        self.up = nn.Linear(width, 4 * width if together else 2 * width, bias=False)
        self.gate = None if together else nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        up, gate = self.up(x).chunk(2, -1) if self.gate is None else (self.up(x), self.gate(x))
        return self.down(F.silu(gate) * up)


class WrittenOut(nn.Module):
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
    """Attention and a network, one after the other or side by side."""

    def __init__(self, beside=False, eager=False):
        super().__init__()
        self.beside, self.eager = beside, eager
        self.before, self.after = RmsNorm(), nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.network = Gated()

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


class Language(nn.Module):
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


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.einsum("btd,btkde->btke", x, self.experts[chosen])
        return (mixed * weights[..., None]).sum(-2)


def data(*shape):
    return torch.randn(*shape)


READ = [recorded, exported]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    ("network", "gated", "layers"),
    [
        (Gated(), True, 3),
        (Gated(together=True), True, 2),
        (WrittenOut(), False, 2),
        (
            nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 8)),
            False,
            3,
        ),
    ],
)
def test_networks(read, network, gated, layers):
    (match,) = found_in("mlp", read(network, data(2, 3, 8)))
    assert match.details["gated"] == gated
    assert match.details["layers"] == layers


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)),
    ],
)
def test_layers_without_an_activation_between_are_no_network(other):
    assert found_in("mlp", recorded(other, data(2, 3, 8))) == []


@pytest.mark.parametrize("read", READ)
def test_norms(read):
    (match,) = found_in("norm", read(RmsNorm(), data(2, 3, 8)))
    assert match.details == {"fused": False, "kind": "rms_norm"}
    (match,) = found_in("norm", read(nn.LayerNorm(8), data(2, 3, 8)))
    assert match.details["fused"]


def test_a_distance_is_no_norm():
    class Distance(nn.Module):
        def forward(self, x, y):
            return ((x - y).pow(2).mean(-1) + 1e-6).sqrt()

    assert found_in("norm", recorded(Distance(), data(2, 8), data(2, 8))) == []


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_blocks_heads_and_tables_of_a_language_model(train, beside, eager):
    graph = recorded(Language(beside=beside, eager=eager), torch.arange(12).view(2, 6), train=train)
    blocks = found_in("block", graph)
    assert [b.details for b in blocks] == [{"attentions": 1, "feed_forward": "mlp"}] * 3
    assert len({n for b in blocks for n in b.nodes}) == sum(len(b.nodes) for b in blocks), "blocks share nothing"
    (head,) = found_in("output_head", graph)
    assert head.details == {"vocabulary": 50, "tied": False}
    assert [m.details["rows"] for m in found_in("embedding", graph)] == [50, 16]
    assert len(found_in("mlp", graph)) == 3
    assert len(found_in("norm", graph)) == (3 if beside else 6)


def test_a_head_that_shares_the_table_is_surer():
    model = Language()
    model.head.weight = model.tokens.weight
    (match,) = found_in("output_head", recorded(model, torch.arange(6).view(1, 6)))
    assert match.details["tied"]
    assert match.confidence == 1.0


@pytest.mark.parametrize("train", [False, True])
def test_a_mixture_is_found_by_its_router(train):
    (match,) = found_in("mixture_of_experts", recorded(Mixture(), data(2, 3, 8), train=train))
    assert match.details == {"experts": 4, "chosen": 2}


def test_choosing_a_token_is_no_mixture():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 50)

        def forward(self, x):
            return self.head(x).topk(5).indices

    assert found_in("mixture_of_experts", recorded(Choice(), data(2, 8))) == []
