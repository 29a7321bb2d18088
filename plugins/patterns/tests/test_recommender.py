"""Bags, tables and interactions are found however they are written, and nothing in models of other kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import djinn
from djinn.planning import WorkloadType, storage_of
from djinn_patterns.recommender import EmbeddingBag, Interaction

DEVICE = "remote_accelerator:0"
FIELDS, ROWS, WIDTH, BATCH = 3, 20, 4, 2


def found_in(graph):
    patterns = [EmbeddingBag(), Interaction()]
    by = {p: [n for n in graph.nodes if n.operation in p.operations] for p in patterns}
    return [m for p, nodes in by.items() for m in p.match(graph, nodes)]


def recorded(model, *inputs, train=False):
    """The graph, as Djinn records it on meta tensors: no executor is needed to look at a program."""
    return captured(model, *inputs, train=train).graph


def captured(model, *inputs, train=False):
    """The captured program."""
    model, given = model.train(train).to(DEVICE), [i.to(DEVICE) for i in inputs]
    with djinn.capture() as found, torch.set_grad_enabled(train):
        result = model(*given)
        if train:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
    return found


def matches(model, *inputs, train=False):
    return found_in(recorded(model, *inputs, train=train))


def kinds(found):
    return [m.details["kind"] for m in found if m.pattern == "interaction"]


class Tables(nn.Module):
    """A table for each field, and something over their rows."""

    def __init__(self, over, make=None, fields=FIELDS):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(fields))
        self.layers = make() if make is not None else None
        self.over = over

    def forward(self, ids):
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.over(rows) if self.layers is None else self.over(rows, self.layers)


def ids(fields=FIELDS):
    return torch.zeros(BATCH, fields, dtype=torch.long)


def all_pairs(rows):
    features = torch.stack(rows, 1)
    return torch.bmm(features, features.transpose(1, 2))


def some_pairs(rows):
    features = torch.stack(rows, 1)
    return (features[:, [0, 0, 1]] * features[:, [1, 2, 2]]).sum(-1)


def factorised(rows):
    features = torch.stack(rows, 1)
    return 0.5 * (features.sum(1) ** 2 - (features**2).sum(1))


def factorised_by_multiplying(rows):
    features = torch.stack(rows, 1)
    total = features.sum(1)
    return total * total - (features * features).sum(1)


def crossed(rows, layers):
    first = state = torch.cat(rows, 1)
    for layer in layers:
        state = first * layer(state) + state
    return state


def crossed_in_one_op(rows, layers):
    first = torch.cat(rows, 1)
    return torch.addcmul(first, first, layers[0](first))


def masked(rows, layers):
    first = torch.cat(rows, 1)
    return functional.layer_norm(first, first.shape[1:]) * layers[1](layers[0](first).relu())


def compressed(rows, layers):
    features = torch.stack(rows, 1)
    return torch.bmm(features, layers(features.transpose(1, 2)))


def outer(rows):
    total = torch.stack(rows, 1).sum(1)
    return total.unsqueeze(2) @ total.unsqueeze(1)


def factorised_the_other_way_round(rows):
    features = torch.stack(rows, 1)
    return -(features.square().sum((1, 2)) - features.sum(1).square().sum(-1)) / 2


def added_one_by_one(rows):
    features = torch.stack(rows, 1)
    return sum((features[:, i] * features[:, j]).sum(-1) for i, j in ((0, 1), (0, 2), (1, 2)))


def of_a_batch(rows, layers):
    features = torch.stack(rows, 1).flatten(1)
    return layers[0](features).relu() @ layers[1](features).relu().T


def by_a_form(rows, layer):
    features = torch.stack(rows, 1)
    return layer(features[:, 0], features[:, 1])


def parts_apart(rows):
    features = torch.stack(rows, 1)
    return functional.pairwise_distance(features[:, 0], features[:, 1])


def multiplied(rows):
    return rows[0] * rows[1]


def scored(rows, layers):
    left, right = (layer(row) for layer, row in zip(layers[:2], rows[:2], strict=True))
    return functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T


def apart(rows):
    return (rows[0] - rows[1]).norm(dim=-1)


def attended(rows, layers):
    features = torch.stack(rows, 1)
    query, key, value = (layer(features) for layer in layers)
    return (query @ key.transpose(-1, -2) / 2).softmax(-1) @ value


def attended_by_one_op(rows, layers):
    """Two layers of AutoInt, the second over what the first gave."""
    features = torch.stack(rows, 1)
    for _ in range(2):
        query, key, value = (layer(features) for layer in layers)
        features = functional.scaled_dot_product_attention(query, key, value) + features
    return features


def gated_crosses(rows, layers):
    first = state = torch.cat(rows, 1)
    for _ in range(2):
        state = first * layers[0](state) * layers[1](state).sigmoid() + state
    return state


def by_a_matrix_for_each_pair(rows, weights):
    features = torch.stack(rows, 1)
    return torch.einsum("bpi,pij->bpj", features[:, [0, 0, 1]], weights.matrices) * features[:, [1, 2, 2]]


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = nn.Parameter(torch.zeros(3, WIDTH, WIDTH))


def wide():
    return nn.ModuleList(nn.Linear(FIELDS * WIDTH, FIELDS * WIDTH) for _ in range(2))


def narrow():
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)) for _ in range(FIELDS))


INTERACTIONS = {
    "dot": (all_pairs, None, ["dot"]), "pairs": (some_pairs, None, ["pairs"]),
    "factorisation": (factorised, None, ["factorisation"]),
    "products of sums": (factorised_by_multiplying, None, ["factorisation"]),
    "cross": (crossed, wide, ["cross", "cross"]), "addcmul": (crossed_in_one_op, wide, ["cross"]),
    "product": (multiplied, None, ["product"]), "towers": (scored, narrow, ["towers"]),
    "mask": (masked, wide, ["mask"]), "compressed": (compressed, lambda: nn.Linear(FIELDS, 2), ["dot"]),
    "other way round": (factorised_the_other_way_round, None, ["factorisation"]),
    "one by one": (added_one_by_one, None, ["pairs"]), "batch": (of_a_batch, wide, ["towers"]),
    "form": (by_a_form, lambda: nn.Bilinear(WIDTH, WIDTH, 1), ["product"]), "parts apart": (parts_apart, None, ["distance"]),
    "outer": (outer, None, ["dot"]), "distance": (apart, None, ["distance"]), "attention": (attended, narrow, ["attention"]),
    "attention twice": (attended_by_one_op, narrow, ["attention", "attention"]),
    "gated crosses": (gated_crosses, wide, ["cross", "cross"]),
    "matrices": (by_a_matrix_for_each_pair, Matrices, ["pairs"]),
}  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", INTERACTIONS)
def test_interactions(name, train):
    over, make, expected = INTERACTIONS[name]
    assert kinds(matches(Tables(over, make), ids(), train=train)) == expected


def test_products_of_bags_that_lie_in_one_table():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.dense = nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), nn.Linear(5, WIDTH)

        def forward(self, ids, starts, dense):
            sparse = self.bags(ids, starts).view(BATCH, FIELDS, WIDTH)
            features = torch.cat([self.dense(dense).unsqueeze(1), sparse], 1)
            return torch.bmm(features, features.transpose(1, 2)).flatten(1)[:, [1, 2, 3, 6, 7, 11]]

    starts = torch.arange(BATCH * FIELDS) * 2
    assert kinds(matches(Packed(), torch.zeros(12, dtype=torch.long), starts, torch.zeros(BATCH, 5))) == ["dot"]


def test_bags_that_are_written_out_make_a_recommender():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.deep, self.layer = nn.Embedding(1000, 1), nn.Embedding(1000, 4), nn.Linear(16, 1)

        def forward(self, ids):
            return self.wide(ids).sum(1) + self.layer(self.deep(ids).flatten(1))

    assert captured(Wide(), torch.zeros(5, 4, dtype=torch.long)).profile.workload is WorkloadType.RECOMMENDER


def gated(rows, layers):
    """As in a highway: the gate keeps more or less of each number, features do not meet."""
    first = torch.cat(rows, 1)
    kept = layers[0](first).sigmoid()
    return first * kept + layers[1](first).relu() * (1 - kept)


@pytest.mark.parametrize(("over", "make"), [(gated, wide), (lambda rows: rows[0] - rows[1], None)])
def test_what_is_no_interaction(over, make):
    assert not kinds(matches(Tables(over, make), ids()))


def test_features_of_one_table_meet_after_they_were_added_up():
    """Each field has rows of its own, so one look-up is many features; without, it is one feature, or words."""

    class OneTable(nn.Module):
        def __init__(self, fields):
            super().__init__()
            self.table = nn.Embedding(FIELDS * ROWS, WIDTH)
            self.register_buffer("offsets", torch.arange(FIELDS) * ROWS if fields else None)

        def forward(self, given):
            total = self.table(given if self.offsets is None else given + self.offsets).relu().sum(1)
            return total.unsqueeze(2) @ total.unsqueeze(1)

    assert kinds(matches(OneTable(fields=True), ids())) == ["dot"]
    assert not kinds(matches(OneTable(fields=False), ids()))


@pytest.mark.parametrize("train", [False, True])
def test_a_row_beside_what_a_recurrence_makes_of_others(train):
    """Scores of a candidate with a user's whole history, as in DIEN."""

    class Evolving(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.states = nn.Embedding(ROWS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, history, candidate):
            return self.states(self.table(history))[0] @ self.table(candidate).unsqueeze(2)

    assert kinds(matches(Evolving(), ids(), ids()[:, 0], train=train)) == ["towers"]


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_of_negatives_are_looked_up_by_ids_that_are_made_here(drawn):
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)

        def forward(self, person, thing):
            none = (
                torch.randint(0, ROWS, (BATCH, 2), device=thing.device) if drawn else torch.stack([thing, thing + 1], 1)
            )
            return torch.bmm(self.other(none), self.one(person).unsqueeze(2))

    assert kinds(matches(Sampled(), ids()[:, 0], ids()[:, 1])) == ["towers"]


def test_what_meets_is_named():
    (match,) = (m for m in matches(Tables(multiplied, fields=2), ids(2)) if m.pattern == "interaction")
    assert match.details == {"kind": "product", "tables": 2}


class Pooled(nn.Module):
    """Rows that are looked up, weighed and reduced."""

    def __init__(self, reduce):
        super().__init__()
        self.table, self.reduce = nn.Embedding(ROWS, WIDTH), reduce

    def forward(self, given):
        return self.reduce(self.table(given))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("reduce", "mode"),
    [
        (lambda rows: rows.sum(1), "sum"), (lambda rows: rows.mean(-2), "mean"),
        (lambda rows: (rows * torch.ones(BATCH, FIELDS, 1, device=rows.device)).sum(dim=1), "sum"),
    ],
)  # fmt: skip
def test_bags_that_are_written_out(reduce, mode, train):
    graph = recorded(Pooled(reduce), ids(), train=train)
    (match,) = (m for m in found_in(graph) if m.pattern == "embedding_bag")
    assert match.details == {"rows": ROWS, "width": WIDTH, "mode": mode, "fused": False}
    assert match.hints["tables"] == (graph.nodes[match.nodes[0]].inputs[0],)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_pytorch(mode):
    (match,) = matches(nn.EmbeddingBag(ROWS, WIDTH, mode=mode), ids())
    assert match.confidence == 1.0
    assert match.details == {"rows": ROWS, "width": WIDTH, "mode": mode, "fused": True}
    assert storage_of(match.hints["tables"][0])


@pytest.mark.parametrize(
    "reduce",
    [lambda rows: rows.sum(-1), lambda rows: rows.sum((1, 2)), lambda rows: rows + rows.mean(1, keepdim=True)],
)
def test_what_is_no_bag(reduce):
    assert not matches(Pooled(reduce), ids())


class Text(nn.Module):
    """Tokens and positions, through attention (written out or not) to scores."""

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
def test_text_is_no_recommender(counted, train):
    """Positions that are counted are no ids, even where tokens are multiplied with them."""
    assert not matches(Text(counted), ids(), train=train)


def test_sentences_that_are_compared_are_no_recommender():
    """The walk ends at attention: two encoders of text are no towers over ids."""
    table, layer = nn.Embedding(ROWS, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, dropout=0.0)

    class Compared(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = table, layer

        def forward(self, left, right):
            one, other = (self.layer(self.table(given))[:, 0] for given in (left, right))
            return one @ other.T

    assert not matches(Compared(), ids(), ids())


def test_coordinates_of_words_are_no_tables_of_a_recommender():
    """As in LayoutLM: a row for each word, and not for each sample."""
    assert not matches(Tables(lambda rows: torch.cat(rows, -1)), torch.zeros(BATCH, FIELDS, 7, dtype=torch.long))


class Gated(nn.Module):
    """Features that are gated by layers over them, and added to: no cross, because nothing is multiplied with a layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Linear(FIELDS * WIDTH, 8), nn.Linear(FIELDS * WIDTH, 8)

    def forward(self, rows):
        state = torch.cat(rows, 1)
        return torch.sigmoid(self.gate(state)) * self.layer(state)


def test_gates_over_features_are_no_interaction():
    gated = Gated().to(DEVICE)
    assert not matches(Tables(gated), ids())
