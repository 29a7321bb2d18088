"""Recommenders, as people write them. Labels come from classes.

A class whose name ends with `Interaction` lets features meet and does nothing else; one whose name ends with `Pooling` looks
rows up and reduces them.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import FIELDS, ROWS, WIDTH, PerceptronTower, clicked, plain, visits
from evaluation.zoo.building import Inputs, numbers

ITEMS = 300


class Tables(nn.Module):
    """A table for each field; their rows, one below the other."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(FIELDS))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)


class OneTable(nn.Module):
    """One table for all fields, in which each has rows of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(FIELDS * ROWS, width)
        self.register_buffer("offsets", torch.arange(FIELDS) * ROWS)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.table(fields + self.offsets)


class FirstOrderPooling(OneTable):
    """A weight for each id, added up: the linear part of a factorization machine."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return super().forward(fields).sum(dim=1)


class HistoryPooling(nn.Module):
    """The mean of the rows of a user's history, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS, WIDTH, padding_idx=0)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        mask = (history != 0).unsqueeze(-1).float()
        return (self.table(history) * mask).sum(1) / mask.sum(1).clamp(min=1)


class MachineInteraction(nn.Module):
    """Half of the square of the sum less the sum of the squares."""

    def __init__(self, total: bool = True) -> None:
        super().__init__()
        self.total = total

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        square_of_sum = torch.sum(features, dim=1) ** 2
        sum_of_squares = torch.sum(features**2, dim=1)
        both = 0.5 * (square_of_sum - sum_of_squares)
        return both.sum(1, keepdim=True) if self.total else both


class Recommender(nn.Module):
    """Features through something to a score."""

    def __init__(self, embedding: nn.Module, rest: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.rest, self.first = embedding, rest, first

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        score = self.rest(self.embedding(fields))
        return clicked(score + self.first(fields) if self.first is not None else score, labels)


def _clicks() -> Inputs:
    return visits(dense=False)


@plain("recommender")
def factorization_machine() -> tuple[nn.Module, Inputs]:
    """FM."""
    return Recommender(OneTable(), MachineInteraction(), FirstOrderPooling()), _clicks()


@plain("recommender")
def one_table_fm() -> tuple[nn.Module, Inputs]:
    """FM without the linear part, and a layer after it."""
    return Recommender(OneTable(), nn.Sequential(MachineInteraction(total=False), nn.Linear(WIDTH, 1))), _clicks()


@plain("recommender")
def neural_fm() -> tuple[nn.Module, Inputs]:
    """NFM: a network over the bi-interaction."""
    network = nn.Sequential(MachineInteraction(total=False), nn.BatchNorm1d(WIDTH), PerceptronTower(WIDTH, 16, 1))
    return Recommender(Tables(), network, FirstOrderPooling()), _clicks()


class AttentiveInteraction(nn.Module):
    """All pairs of features, weighed (AFM)."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows, columns = zip(*itertools.combinations(range(FIELDS), 2), strict=True)
        pairs = features[:, list(rows)] * features[:, list(columns)]
        return self.out((functional.softmax(self.weigh(pairs), dim=1) * pairs).sum(1))


@plain("recommender")
def attentional_fm() -> tuple[nn.Module, Inputs]:
    """AFM."""
    return Recommender(Tables(), AttentiveInteraction(), FirstOrderPooling()), _clicks()


class FieldAwareInteraction(nn.Module):
    """Products of rows that fields keep for each other (FFM)."""

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        pairs = [features[j][:, i] * features[i][:, j] for i, j in itertools.combinations(range(FIELDS), 2)]
        return torch.stack(pairs, 1).sum(1)


class FieldAware(nn.Module):
    """FFM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(OneTable() for _ in range(FIELDS))
        self.interaction, self.first = FieldAwareInteraction(), FirstOrderPooling()

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        met = self.interaction([table(fields) for table in self.tables])
        return clicked(met.sum(1, keepdim=True) + self.first(fields), labels)


@plain("recommender")
def field_aware_fm() -> tuple[nn.Module, Inputs]:
    """FFM."""
    return FieldAware(), _clicks()


class ProductInteraction(nn.Module):
    """Inner products of all pairs of fields (PNN)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows, columns = zip(*itertools.combinations(range(FIELDS), 2), strict=True)
        return (features[:, list(rows)] * features[:, list(columns)]).sum(-1)


class ProductNetwork(nn.Module):
    """Products of pairs beside the features, through a network (PNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.interaction = ProductInteraction()
        self.network = PerceptronTower(FIELDS * WIDTH + FIELDS * (FIELDS - 1) // 2, 16, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([features.flatten(1), self.interaction(features)], 1))


@plain("recommender")
def product_network() -> tuple[nn.Module, Inputs]:
    """PNN."""
    return Recommender(Tables(), ProductNetwork()), _clicks()


class CompressedInteraction(nn.Module):
    """Outer products of features, compressed by a convolution (xDeepFM)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(FIELDS * FIELDS, 6, 1), nn.Conv1d(FIELDS * 6, 6, 1)])
        self.out = nn.Linear(12, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        last, sums = features, []
        for layer in self.layers:
            outer = features.unsqueeze(2) * last.unsqueeze(1)
            last = torch.relu(layer(outer.flatten(1, 2)))
            sums.append(last.sum(2))
        return self.out(torch.cat(sums, 1))


@plain("recommender")
def xdeepfm() -> tuple[nn.Module, Inputs]:
    """xDeepFM."""
    return Recommender(Tables(), CompressedInteraction(), FirstOrderPooling()), _clicks()


class VectorCrossInteraction(nn.Module):
    """x0 * (w x) + b + x (DCN)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(FIELDS * WIDTH, 1, bias=False)
        self.bias = nn.Parameter(torch.randn(FIELDS * WIDTH))

    def forward(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return first * self.weight(state) + self.bias + state


class LowRankInteraction(nn.Module):
    """x0 * (U tanh(V x) + b) + x (DCN-Mix)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(FIELDS * WIDTH, 6, bias=False), nn.Linear(6, FIELDS * WIDTH)

    def forward(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return first * self.up(torch.tanh(self.down(state))) + state


class Crosses(nn.Module):
    """Crosses beside a network."""

    def __init__(self, made: type[nn.Module]) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(made() for _ in range(2))
        self.deep = PerceptronTower(FIELDS * WIDTH, 32, 16)
        self.score = nn.Linear(FIELDS * WIDTH + 16, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        first = state = features.flatten(1)
        for cross in self.crosses:
            state = cross(first, state)
        return self.score(torch.cat([state, self.deep(first)], 1))


@plain("recommender")
def dcn_v1() -> tuple[nn.Module, Inputs]:
    """DCN."""
    return Recommender(Tables(), Crosses(VectorCrossInteraction)), _clicks()


@plain("recommender")
def dcn_mix() -> tuple[nn.Module, Inputs]:
    """DCN-Mix."""
    return Recommender(OneTable(), Crosses(LowRankInteraction)), _clicks()


class BilinearInteraction(nn.Module):
    """A layer over one field times another, for all pairs (FiBiNET)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        parts = features.unbind(1)
        return torch.cat([self.layer(a) * b for a, b in itertools.combinations(parts, 2)], 1)


@plain("recommender")
def bilinear_network() -> tuple[nn.Module, Inputs]:
    """FiBiNET."""
    pairs = FIELDS * (FIELDS - 1) // 2
    network = nn.Sequential(BilinearInteraction(), PerceptronTower(pairs * WIDTH, 16, 1))
    return Recommender(Tables(), network), _clicks()


class Bags(nn.Module):
    """DLRM with bags of several ids, given as lists and where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="mean") for _ in range(3))
        self.bottom = PerceptronTower(6, 16, WIDTH)
        self.interaction = BatchedDotInteraction()
        self.top = PerceptronTower(WIDTH + 6, 16, 1)

    def forward(
        self, ids: torch.Tensor, starts: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        first = self.bottom(dense)
        rows = [bag(ids[i], starts[i]) for i, bag in enumerate(self.bags)]
        return clicked(self.top(self.interaction(first, rows)), labels)


class BatchedDotInteraction(nn.Module):
    """As in Facebook's DLRM: one product of a batch, and the lower triangle of it."""

    def forward(self, dense: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        batch, width = dense.shape
        features = torch.cat([dense, *rows], 1).view(batch, -1, width)
        products = torch.bmm(features, torch.transpose(features, 1, 2))
        below = [(i, j) for i in range(products.shape[1]) for j in range(i)]
        rows_of, columns_of = (torch.tensor(part, device=dense.device) for part in zip(*below, strict=True))
        return torch.cat([dense, products[:, rows_of, columns_of]], 1)


@plain("recommender")
def dlrm_offsets() -> tuple[nn.Module, Inputs]:
    """DLRM as it was published."""
    ids = torch.randint(0, ROWS, (3, 12), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([[0, 2, 5, 9], [0, 3, 4, 8], [0, 1, 6, 10]])
    given = {"ids": ids, "starts": starts, "dense": numbers(4, 6)}
    return Bags(), given | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class PooledTables(nn.Module):
    """DLRM whose fields have several ids, looked up and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = nn.ModuleList(HistoryPooling() for _ in range(3))
        self.bottom = PerceptronTower(6, 16, WIDTH)
        self.interaction = BatchedDotInteraction()
        self.top = PerceptronTower(WIDTH + 6, 16, 1)

    def forward(
        self, lists: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        rows = [pool(lists[:, i]) for i, pool in enumerate(self.pools)]
        return clicked(self.top(self.interaction(self.bottom(dense), rows)), labels)


@plain("recommender")
def dlrm_multi_hot() -> tuple[nn.Module, Inputs]:
    """DLRM with many ids a field."""
    lists = torch.randint(0, ITEMS, (4, 3, 5), generator=torch.Generator().manual_seed(0))
    return PooledTables(), {"lists": lists, "dense": numbers(4, 6), "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class Deep(nn.Module):
    """A network over features, with residual connections, and nothing else (Deep Crossing)."""

    def __init__(self) -> None:
        super().__init__()
        width = FIELDS * WIDTH
        self.towers = nn.ModuleList(PerceptronTower(width, 16, width) for _ in range(2))
        self.score = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state = features.flatten(1)
        for tower in self.towers:
            state = torch.relu(state + tower(state))
        return self.score(state)


@plain("recommender")
def deep_crossing() -> tuple[nn.Module, Inputs]:
    """Deep Crossing."""
    return Recommender(Tables(), Deep()), _clicks()


class Experts(nn.Module):
    """Several networks, mixed for each of two tasks (MMoE)."""

    def __init__(self) -> None:
        super().__init__()
        width = FIELDS * WIDTH
        self.experts = nn.ModuleList(PerceptronTower(width, 16, 8) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(width, 3) for _ in range(2))
        self.scores = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state = features.flatten(1)
        known = torch.stack([expert(state) for expert in self.experts], 1)
        mixed = [(gate(state).softmax(-1).unsqueeze(-1) * known).sum(1) for gate in self.gates]
        return sum(score(m) for score, m in zip(self.scores, mixed, strict=True))


@plain("recommender")
def mixture_of_tasks() -> tuple[nn.Module, Inputs]:
    """MMoE."""
    return Recommender(Tables(), Experts()), _clicks()


@plain("recommender")
def final_mlp() -> tuple[nn.Module, Inputs]:
    """Two networks over the same features, and how they meet (FinalMLP)."""
    return Recommender(Tables(), TwoStreams()), _clicks()


class StreamInteraction(nn.Module):
    """Layers over both streams, and a bilinear form."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 1), nn.Linear(width, 1)
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.left(left) + self.right(right) + ((left @ self.weight) * right).sum(-1, keepdim=True)


class TwoStreams(nn.Module):
    """FinalMLP."""

    def __init__(self) -> None:
        super().__init__()
        half = FIELDS * WIDTH // 2
        self.left, self.right = PerceptronTower(half, 16), PerceptronTower(half, 16)
        self.interaction = StreamInteraction(16)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        left, right = features.flatten(1).chunk(2, 1)
        return self.interaction(torch.relu(self.left(left)), torch.relu(self.right(right)))


class FieldAttentionInteraction(nn.Module):
    """Features look at each other (AutoInt): weighted sums of layers over them."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.around = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        shape = (*features.shape[:2], self.heads, -1)
        query, key, value = (
            layer(features).view(shape).transpose(1, 2) for layer in (self.queries, self.keys, self.values)
        )
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return torch.relu((weights @ value).transpose(1, 2).flatten(2) + self.around(features))


@plain("recommender")
def attentive_features() -> tuple[nn.Module, Inputs]:
    """AutoInt, written out."""
    network = nn.Sequential(FieldAttentionInteraction(), nn.Flatten(), nn.Linear(FIELDS * WIDTH, 1))
    return Recommender(Tables(), network, FirstOrderPooling()), _clicks()


@plain("recommender")
def attention_over_fields() -> tuple[nn.Module, Inputs]:
    """AutoInt over one table."""
    network = nn.Sequential(FieldAttentionInteraction(1), nn.Flatten(), nn.Linear(FIELDS * WIDTH, 1))
    return Recommender(OneTable(), network), _clicks()
