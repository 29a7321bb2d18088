"""Attention that is no softmax of one product: linear, in blocks, additive, normalised by logsumexp; and what is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
from djinn_attention import AttentionPattern

BATCH, LENGTH, WIDTH, HEADS = 2, 12, 32, 4


def match_layer(mix, module=None, length=LENGTH):
    """Return the ops of each attention match in a layer that applies `mix` to projected queries, keys and values."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.more = module

        def forward(self, x):
            q, k, v = (
                layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            mixed = mix(q, k, v) if module is None else mix(q, k, v, self.more)
            return self.out(mixed.transpose(1, 2).flatten(2))

    with torch.device("meta"):
        layer, x = Layer(), torch.zeros(BATCH, length, WIDTH)
    return capture_and_match(layer, x)


def capture_and_match(layer, *inputs):
    with djinn.capture() as captured, torch.no_grad():
        kept = layer(*inputs)
    graph = captured.graph
    pattern = AttentionPattern()
    matches = list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))
    del kept
    return graph, matches


def ops(graph, match):
    return [graph.nodes[i].operation for i in match.nodes]


def linear(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(2).unsqueeze(-1))


def efficient(q, k, v):
    return q.softmax(-1) @ (k.softmax(2).transpose(-1, -2) @ v)


def positive_features(q, k, v):
    q, k = (((x - x.square().sum(-1, keepdim=True) / 2).exp() + 1e-4) for x in (q, k))
    scale = 1 / torch.einsum("bhnf,bhf->bhn", q, k.sum(2))
    return torch.einsum("bhfd,bhnf,bhn->bhnd", torch.einsum("bhnf,bhnd->bhfd", k, v), q, scale)


def random_features(q, k, v):
    """Return linear attention like `positive_features`, with separate random directions per head."""
    directions = torch.zeros(HEADS, WIDTH // HEADS, 6).expand(BATCH, -1, -1, -1)
    q, k = ((x @ directions).exp() + 1e-4 for x in (q, k))
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(2).unsqueeze(-1))


def logsumexp_attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def cosine_attention(q, k, v):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return (1 - torch.acos((q @ k.transpose(-1, -2)).clamp(-0.99, 0.99)) / math.pi).pow(8) @ v


def blockwise(q, k, v):
    """Attend in three query blocks. The middle block reads two separate slices of the keys."""
    first, middle, last = q.split(LENGTH // 3, 2)
    whole = [(x @ k.transpose(-1, -2)).softmax(-1) @ v for x in (first, last)]
    near, far = k[:, :, :4], k[:, :, 8:]
    weights = torch.cat([middle @ near.transpose(-1, -2), middle @ far.transpose(-1, -2)], -1).softmax(-1)
    mixed = weights[..., :4] @ v[:, :, :4] + weights[..., 4:] @ v[:, :, 8:]
    return torch.cat([whole[0], mixed, whole[1]], 2)


def landmark_attention(q, k, v):
    few = [x.unflatten(2, (4, -1)).mean(3) for x in (q, k)]
    one = (q @ few[1].transpose(-1, -2)).softmax(-1)
    two = (few[0] @ few[1].transpose(-1, -2)).softmax(-1)
    three = (few[0] @ k.transpose(-1, -2)).softmax(-1)
    inverse = two.transpose(-1, -2)
    for _ in range(2):
        inverse = 2 * inverse - inverse @ two @ inverse
    return (one @ inverse) @ (three @ v)


def mixed_heads(q, k, v, weights):
    scores = torch.einsum("bhnm,hk->bknm", q @ k.transpose(-1, -2), weights)
    return torch.einsum("bhnm,hk->bknm", scores.softmax(-1), weights) @ v


KINDS = [
    linear,
    efficient,
    positive_features,
    random_features,
    logsumexp_attention,
    cosine_attention,
    blockwise,
    landmark_attention,
]


@pytest.mark.parametrize("mix", KINDS, ids=lambda mix: mix.__name__)
def test_attention_with_several_softmaxes_matches_once(mix):
    graph, matches = match_layer(mix)
    (match,) = matches
    softmaxes = [i for o in ("_softmax", "softmax") for i in graph.by_op.get(o, ())]
    assert set(softmaxes) <= set(match.nodes)
    assert {"matmul", "bmm"} & set(ops(graph, match))
    assert match.confidence >= 0.8


def test_talking_heads_attention_matches_once():
    with torch.device("meta"):
        weights = nn.Parameter(torch.zeros(HEADS, HEADS))
    assert len(match_layer(mixed_heads, weights)[1]) == 1


def test_additive_attention_matches():
    class Additive(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.places, self.score = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, 1)

        def forward(self, state, places):
            scores = self.score(torch.tanh(self.state(state).unsqueeze(1) + self.places(places)))
            return (scores.softmax(1) * places).sum(1)

    with torch.device("meta"):
        layer, state, places = Additive(), torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, LENGTH, WIDTH)
    layer = nn.Sequential(nn.Identity(), layer)

    def run(state, places):
        return layer[1](state, places.relu())

    (match,) = capture_and_match(run, state, places)[1]
    assert match.confidence == 0.93


class Gates(nn.Module):
    """Several networks, mixed by the softmax of a layer. This is not attention."""

    def __init__(self):
        super().__init__()
        self.experts, self.gate = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        known = torch.stack([expert(x).relu() for expert in self.experts], 1)
        return (self.gate(x).softmax(-1).unsqueeze(-1) * known).sum(1)


class Adapter(nn.Module):
    """A product with a product of low-rank weights. This is not attention."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.zeros(WIDTH, 4)), nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x):
        return x.relu() @ self.down @ self.up


class Gram(nn.Module):
    """Products of features with each other, as in style transfer. This is not attention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        features = self.layer(x)
        return features.transpose(-1, -2) @ features


@pytest.mark.parametrize("kind", [Gates, Adapter, Gram])
def test_attention_pattern_rejects_lookalikes(kind):
    with torch.device("meta"):
        layer, x = kind(), torch.zeros(BATCH, *(() if kind is Gates else (LENGTH,)), WIDTH)
    assert capture_and_match(layer, x)[1] == []


def test_linear_attention_gradients_do_not_match():
    with torch.device("meta"):
        layers, x = [nn.Linear(WIDTH, WIDTH) for _ in range(3)], torch.zeros(BATCH, LENGTH, WIDTH)
    with djinn.capture() as captured:
        q, k, v = (layer(x) for layer in layers)
        (q.relu() @ (k.relu().transpose(1, 2) @ v)).square().mean().backward()
    pattern = AttentionPattern()
    candidates = [n for n in captured.graph.nodes if n.operation in pattern.operations]
    (match,) = pattern.match(captured.graph, candidates)
    assert max(match.nodes) < min(captured.graph.by_op["ones_like"])
