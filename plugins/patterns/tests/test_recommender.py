"""Embedding bags are matched in each way of writing, and not in models of other kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import djinn
from djinn.planning import WorkloadType, storage_of
from djinn_patterns.recommender import EmbeddingBag

DEVICE = "remote_accelerator:0"
FIELDS, ROWS, WIDTH, BATCH = 3, 20, 4, 2


def match_graph(graph):
    pattern = EmbeddingBag()
    return list(pattern.match(graph, [n for n in graph.nodes if n.operation in pattern.operations]))


def record_graph(model, *inputs, train=False):
    """Return the graph that Djinn records on meta tensors, without an executor."""
    return capture_model(model, *inputs, train=train).graph


def capture_model(model, *inputs, train=False):
    model, given = model.train(train).to(DEVICE), [i.to(DEVICE) for i in inputs]
    with djinn.capture() as found, torch.set_grad_enabled(train):
        result = model(*given)
        if train:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
    return found


def match_model(model, *inputs, train=False):
    return match_graph(record_graph(model, *inputs, train=train))


def ids(fields=FIELDS):
    return torch.zeros(BATCH, fields, dtype=torch.long)


def test_model_with_handwritten_bags_is_recommender():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.deep, self.layer = nn.Embedding(1000, 1), nn.Embedding(1000, 4), nn.Linear(16, 1)

        def forward(self, ids):
            return self.wide(ids).sum(1) + self.layer(self.deep(ids).flatten(1))

    assert capture_model(Wide(), torch.zeros(5, 4, dtype=torch.long)).profile.workload is WorkloadType.RECOMMENDER


class Pooled(nn.Module):
    """A weighted reduction of embedding rows."""

    def __init__(self, reduce):
        super().__init__()
        self.table, self.reduce = nn.Embedding(ROWS, WIDTH), reduce

    def forward(self, given):
        return self.reduce(self.table(given))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "reduce",
    [
        lambda rows: rows.sum(1), lambda rows: rows.mean(-2),
        lambda rows: (rows * torch.ones(BATCH, FIELDS, 1, device=rows.device)).sum(dim=1),
    ],
)  # fmt: skip
def test_handwritten_bags_are_matched(reduce, train):
    graph = record_graph(Pooled(reduce), ids(), train=train)
    (match,) = (m for m in match_graph(graph) if m.pattern == "embedding_bag")
    assert match.hints["tables"] == (graph.nodes[match.nodes[0]].inputs[0],)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_pytorch_embedding_bags_match(mode):
    (match,) = match_model(nn.EmbeddingBag(ROWS, WIDTH, mode=mode), ids())
    assert match.confidence == 1.0
    assert storage_of(match.hints["tables"][0])


@pytest.mark.parametrize(
    "reduce",
    [lambda rows: rows.sum(-1), lambda rows: rows.sum((1, 2)), lambda rows: rows + rows.mean(1, keepdim=True)],
)
def test_other_reductions_are_no_embedding_bags(reduce):
    assert not match_model(Pooled(reduce), ids())


class Text(nn.Module):
    """Scores from tokens and positions through attention, handwritten or from PyTorch."""

    def __init__(self, counted):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(ROWS, WIDTH), nn.Embedding(8, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)
        self.head, self.counted = nn.Linear(WIDTH, ROWS), counted

    def forward(self, given):
        places = torch.arange(given.shape[1], device=given.device)
        state, where = self.tokens(given), self.positions(places)
        state = state * where if self.counted else state + where
        return self.head(self.layer(state))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_text_model_is_not_a_recommender(counted, train):
    """Computed positions are not ids, even if their embeddings are combined with token embeddings."""
    assert not match_model(Text(counted), ids(), train=train)


def test_sentence_similarity_is_not_a_recommender():
    """The search for id inputs ends at attention, so text encoders are not id towers."""
    table, layer = nn.Embedding(ROWS, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)

    class TwoTowers(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = table, layer

        def forward(self, left, right):
            one, other = (self.layer(self.table(given))[:, 0] for given in (left, right))
            return one @ other.T

    assert not match_model(TwoTowers(), ids(), ids())
