"""Attention as people write it, and what only looks like it."""

from __future__ import annotations

import math

import pytest
import torch
from long_forms import long_or
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import djinn_attention
from djinn.planning import fx_graph
from djinn.testing import PatternConformance, PluginConformance
from djinn_attention import AttentionPattern

LENGTH, WIDTH, HEADS = 6, 32, 4


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_attention


def match_graph(graph):
    pattern = AttentionPattern()
    candidates = [n for n in graph.nodes if n.operation in pattern.operations]
    return list(pattern.match(graph, candidates))


def trace_graph(function, *inputs):
    parameters = dict(function.named_parameters()) if isinstance(function, nn.Module) else {}

    def run(parameters, *inputs):
        return functional_call(function, parameters, inputs) if parameters else function(*inputs)

    with torch.no_grad():
        return fx_graph(make_fx(run, tracing_mode="fake")(parameters, *inputs))


def export_graph(module, *inputs):
    with torch.no_grad():
        return fx_graph(torch.export.export(module.eval(), inputs))


class Block(nn.Module):
    """Attention in the style of `mix`, between the projections `query`, `key` and `value`."""

    def __init__(self, mix, kv_heads=HEADS, cross=False):
        super().__init__()
        width = WIDTH // HEADS
        self.mix, self.kv_heads, self.cross = mix, kv_heads, cross
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, kv_heads * width)
        self.value = nn.Linear(WIDTH, kv_heads * width)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory=None):
        source = memory if self.cross else x
        q = self.query(x).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        k, v = (p(source).view(1, -1, self.kv_heads, WIDTH // HEADS).transpose(1, 2) for p in (self.key, self.value))
        mixed = self.mix(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(1, -1, WIDTH))


def repeat(k):
    return k[:, :, None].expand(1, k.shape[1], HEADS // k.shape[1], *k.shape[2:]).reshape(1, HEADS, *k.shape[2:])


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def triangle(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def causal_bias_attention(q, k, v):
    allowed = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None]
    bias = torch.where(allowed, 0.0, torch.finfo(q.dtype).min)
    return F.softmax((q @ k.mT + bias).float(), -1).to(q.dtype) @ v


def einsums(q, k, v):
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def dropout_attention(q, k, v):
    return F.dropout(plain_weights(q, k), 0.1, training=True) @ v


def plain_weights(q, k):
    return torch.softmax(q @ k.mT, -1)


def capped_attention(q, k, v):
    return torch.softmax(torch.tanh(q @ k.mT / 30) * 30, -1) @ v


def in_place(q, k, v):
    scores = q @ k.mT
    scores.mul_(0.5).add_(1.0)
    return scores.softmax(-1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WAYS = [
    plain,
    triangle,
    causal_bias_attention,
    einsums,
    dropout_attention,
    capped_attention,
    in_place,
    fused,
    fused_causal,
]


# The ways that are other ops where they are exported; where they are not, one of the rest is enough.
WHOLE = long_or([einsums, in_place, fused], WAYS)


@pytest.mark.parametrize(
    ("read", "way"),
    [*((trace_graph, way) for way in WAYS), *((export_graph, way) for way in WHOLE)],
    ids=lambda function: function.__name__,
)
def test_attention_variants_match_once(read, way):
    block = Block(way)
    (match,) = match_graph(read(block, torch.rand(1, LENGTH, WIDTH)))
    assert (match.details["queries"], match.details["keys"]) == (LENGTH, LENGTH)
    assert match.details["causal"] is (way in {triangle, causal_bias_attention, fused_causal})
    assert match.confidence > 0.9


@pytest.mark.parametrize("way", [plain, fused], ids=lambda w: w.__name__)
def test_cross_attention_with_repeated_heads_matches_once(way):
    block = Block(lambda q, k, v: way(q, repeat(k), repeat(v)), kv_heads=2, cross=True)
    (match,) = match_graph(trace_graph(block, torch.rand(1, LENGTH, WIDTH), torch.rand(1, 9, WIDTH)))
    assert (match.details["queries"], match.details["keys"]) == (LENGTH, 9)


def test_input_mask_leaves_causality_unknown():
    inputs = [torch.rand(1, HEADS, LENGTH, 8) for _ in range(3)]

    def masked(q, k, v, mask):
        return torch.softmax(q @ k.mT + mask, -1) @ v

    for shape, causal in (((1, 1, LENGTH, LENGTH), None), ((1, 1, 1, LENGTH), False), ((LENGTH,), False)):
        (match,) = match_graph(trace_graph(masked, *inputs, torch.rand(shape)))
        assert match.details["causal"] is causal, shape


def test_single_query_has_no_causality():
    (match,) = match_graph(trace_graph(fused, torch.rand(1, 2, 1, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 2, 5, 8)))
    assert match.details["causal"] is None


def match_details(function, *inputs):
    (match,) = match_graph(trace_graph(function, *inputs))
    return match.details


def local_mask_attention(mask_of):
    """Return an attention function whose mask is `mask_of(keys, queries)`, with both as position tensors."""

    def mix(q, k, v):
        keys, queries = torch.arange(k.shape[-2])[None], torch.arange(q.shape[-2])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(keys, queries))

    return mix


def banded_attention(q, k, v):
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-2)
    return (q @ k.mT).masked_fill(~allowed, -math.inf).softmax(-1) @ v


def inverted_band_attention(q, k, v):
    far = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return (q @ k.mT).masked_fill(far.triu(1) | far.tril(-3), -math.inf).softmax(-1) @ v


MASKS = {
    "sliding": (local_mask_attention(lambda k, q: (k <= q) & (k > q - 3)), True),
    "from the other side": (local_mask_attention(lambda k, q: (q >= k) & ((q - 3) < k)), True),
    "by distance": (local_mask_attention(lambda k, q: ((q - k) >= 0) & ((q - k) <= 2)), True),
    "both ways": (local_mask_attention(lambda k, q: (q - k).abs() <= 2), False),
    "triangles": (banded_attention, True),
    "triangles apart": (inverted_band_attention, True),
    "chunks": (local_mask_attention(lambda k, q: (k // 3 == q // 3) & (k <= q)), True),
    "causal": (local_mask_attention(lambda k, q: k <= q), True),
    "padding of both": (local_mask_attention(lambda k, q: (k < 5) & (q < 4)), False),
}


@pytest.mark.parametrize("way", MASKS)
def test_masks_of_later_keys_are_causal(way):
    mix, causal = MASKS[way]
    assert match_details(mix, *(torch.rand(1, 2, LENGTH, 8) for _ in range(3)))["causal"] is causal


def test_in_place_mask_counts():
    def in_place_mask(q, k, v):
        scores = q @ k.mT
        scores.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1) @ v

    assert match_details(in_place_mask, *(torch.rand(1, 2, LENGTH, 8) for _ in range(3)))["causal"] is True


def test_attention_sinks_are_not_keys():
    def with_sinks(q, k, v, sinks):
        scores = torch.cat([q @ k.mT, sinks.view(1, -1, 1, 1).expand(*q.shape[:-1], 1)], -1)
        weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)
        return weights[..., :-1] @ v

    details = match_details(
        with_sinks, torch.rand(1, 2, LENGTH, 8), *(torch.rand(1, 2, 9, 8) for _ in range(2)), torch.rand(2)
    )
    assert (details["queries"], details["keys"]) == (LENGTH, 9)


class Latent(nn.Module):
    """Attention with keys and values from a low-rank row per token, as in DeepSeek."""

    def __init__(self, in_pieces):
        super().__init__()
        self.in_pieces = in_pieces
        self.query, self.down, self.norm = nn.Linear(WIDTH, HEADS * 10), nn.Linear(WIDTH, 6 + 2), nn.LayerNorm(6)
        self.up = nn.Linear(6, HEADS * 16)

    def forward(self, x):
        narrow, turned = self.down(x).split([6, 2], -1)
        k, v = self.up(self.norm(narrow)).view(1, -1, HEADS, 16).transpose(1, 2).split(8, -1)
        turned = turned[:, None].expand(-1, HEADS, -1, -1)
        if self.in_pieces:
            whole = k.new_empty(*k.shape[:-1], 10)
            whole[..., :8].copy_(k)
            whole[..., 8:].copy_(turned)
        else:
            whole = torch.cat([k, turned], -1)
        return plain(self.query(x).view(1, -1, HEADS, 10).transpose(1, 2), whole, v)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_latent_attention_matches_once(in_pieces):
    graph = trace_graph(Latent(in_pieces), torch.rand(1, LENGTH, WIDTH))
    assert len(match_graph(graph)) == 1


def softmax_layer(x, w1, w2):
    return torch.softmax(x.relu() @ w1, -1) @ w2


def gate(x, router, experts):
    return torch.einsum("be,bei->bi", torch.softmax(F.linear(x, router), -1), (x[:, None] * experts))


def classifier(x, w):
    return torch.softmax(x @ w, -1).argmax(-1)


def softmax_over_queries(q, k, v):
    return torch.softmax(q @ k.mT, -2) @ v


def unrelated(q, k, v):
    return torch.softmax(q, -1) @ v + k @ v


OTHERS = {
    softmax_layer: ((2, 8), (8, 6), (6, 3)),
    gate: ((2, 8), (4, 8), (4, 8)),
    classifier: ((2, 8), (8, 5)),
    softmax_over_queries: ((2, 4, 4), (2, 4, 4), (2, 4, 4)),
    unrelated: ((2, 4, 4), (2, 4, 4), (2, 4, 4)),
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: o.__name__)
def test_other_softmax_products_do_not_match(other):
    assert not match_graph(trace_graph(other, *(torch.rand(s) for s in OTHERS[other])))


def test_backward_passes_match_once():
    def loss(q, k, v):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(plain(q, k, v).sum(), (q, k, v))

    inputs = [torch.rand(1, HEADS, LENGTH, 8) for _ in range(3)]
    graph = fx_graph(make_fx(loss, tracing_mode="fake")(*inputs))
    assert len(match_graph(graph)) == 1


class TestAttention(PatternConformance):
    @pytest.fixture
    def pattern(self):
        return AttentionPattern()

    @pytest.fixture
    def recognised(self):
        return {way.__name__: trace_graph(Block(way), torch.rand(1, LENGTH, WIDTH)) for way in WAYS}
