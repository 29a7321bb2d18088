"""Recommenders that no matcher was developed on, as in their papers: a part of `unseen`.

Classes that end with `Attention`, `Interaction`, `Pooling` or `Recurrence` are labelled so; see README.md.
"""

from __future__ import annotations

import torch
from torch import nn

from evaluation.semantics.plain_models import FIELDS, PLAIN, ROWS, WIDTH, PerceptronTower, clicked, enter, plain, visits
from evaluation.semantics.recommender_models import FirstOrderPooling, MachineInteraction, OneTable, Recommender, Tables
from evaluation.zoo.building import Inputs, numbers

__all__ = ["PLAIN"]


class FieldAttentionInteraction(nn.Module):
    """Self-attention over fields by torch's module (AutoInt)."""

    def __init__(self) -> None:
        super().__init__()
        self.meet, self.around = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.meet(features, features, features, need_weights=False)[0] + self.around(features))


class ThreeTables(nn.Module):
    """Tables of different heights, and numbers that each scale a row, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS * (i + 1), WIDTH) for i in range(FIELDS))
        self.rows = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, fields: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        looked_up = [table(fields[:, i]) for i, table in enumerate(self.tables)]
        return torch.cat([torch.stack(looked_up, 1), dense.unsqueeze(-1) * self.rows], 1)


class Scored(nn.Module):
    """Fields and numbers through a model to a score."""

    def __init__(self, rest: nn.Module) -> None:
        super().__init__()
        self.tables, self.rest = ThreeTables(), rest

    def forward(
        self, fields: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return clicked(self.rest(self.tables(fields, dense)), labels)


_ALL = FIELDS + 6


@plain("recommender")
def autoint_multihead() -> tuple[nn.Module, Inputs]:
    """Return AutoInt over fields and numbers, three layers."""
    layers = [FieldAttentionInteraction() for _ in range(3)]
    return Scored(nn.Sequential(*layers, nn.Flatten(), nn.Linear(_ALL * WIDTH, 1))), visits()


class LowRankCrossInteraction(nn.Module):
    """x0 * (U (V x) + b) + x (DCN v2, Wang et al. 2021)."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return first * self.up(self.down(state)) + state


class DeepAndCross(nn.Module):
    """Three cross layers, followed by a network."""

    def __init__(self) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(LowRankCrossInteraction(_ALL * WIDTH) for _ in range(3))
        self.deep = PerceptronTower(_ALL * WIDTH, 32, 16, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state = first = features.flatten(1)
        for cross in self.crosses:
            state = cross(first, state)
        return self.deep(state)


enter("recommender", "dcn_v2_stacked", lambda: (Scored(DeepAndCross()), visits()))


class TriangleInteraction(nn.Module):
    """Products of all pairs of features, each once, taken from the flattened matrix (TorchRec)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        upper = torch.triu_indices(count, count, 1)
        self.register_buffer("chosen", upper[0] * count + upper[1])

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        features = torch.cat((dense.unsqueeze(1), sparse), 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return torch.cat((dense, products.index_select(1, self.chosen)), 1)


class TorchRecDLRM(nn.Module):
    """One table for all bags, as production code packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(FIELDS * ROWS, WIDTH, mode="sum", include_last_offset=True)
        self.bottom, self.interaction = PerceptronTower(6, 32, 16, WIDTH), TriangleInteraction(FIELDS + 1)
        self.top = PerceptronTower(WIDTH + (FIELDS + 1) * FIELDS // 2, 32, 16, 1)

    def forward(
        self, ids: torch.Tensor, starts: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        sparse = self.bags(ids, starts).view(len(dense), FIELDS, WIDTH)
        return clicked(self.top(self.interaction(self.bottom(dense), sparse)), labels)


@plain("recommender")
def dlrm_packed() -> tuple[nn.Module, Inputs]:
    """Return DLRM with packed bags."""
    ids = torch.randint(0, FIELDS * ROWS, (4 * FIELDS * 2,), generator=torch.Generator().manual_seed(0))
    given = {"ids": ids, "starts": torch.arange(4 * FIELDS + 1) * 2, "dense": numbers(4, 6)}
    return TorchRecDLRM(), given | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class DeepMachine(nn.Module):
    """A factorization machine and a deep network over the same rows; numbers have rows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = MachineInteraction()
        self.deep = PerceptronTower(_ALL * WIDTH, 32, 32, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.machine(features) + self.deep(features.flatten(1))


enter("recommender", "deepfm_dense", lambda: (Scored(DeepMachine()), visits()))


class WideLinear(nn.Module):
    """A linear model over sparse crosses beside a deep network (Cheng et al. 2016), in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = OneTable(), FirstOrderPooling()
        self.deep = nn.Sequential(nn.Flatten(), nn.Linear(FIELDS * WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(),
                                  nn.Linear(32, 1))  # fmt: skip

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return clicked(self.deep(self.rows(fields)) + self.wide(fields), labels)


enter("recommender", "wide_and_deep_one_table", lambda: (WideLinear(), visits(dense=False)))


class FactorInteraction(nn.Module):
    """The product of a user's and an item's factors, and a layer over it (GMF)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.layer(left * right)


class Factorization(nn.Module):
    """Generalised matrix factorization (He et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, WIDTH), nn.Embedding(300, WIDTH)
        self.interaction = FactorInteraction()

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return clicked(self.interaction(self.users(user), self.items(item)), labels)


@plain("recommender")
def ncf_gmf() -> tuple[nn.Module, Inputs]:
    """Return neural collaborative filtering, GMF alone."""
    given = {"user": torch.tensor([3, 14, 15, 92]), "item": torch.tensor([6, 53, 58, 97])}
    return Factorization(), given | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class MaskedInteraction(nn.Module):
    """A mask computed from all features multiplies them (MaskNet, Wang et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask, self.norm = PerceptronTower(width, 64, width), nn.LayerNorm(width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.mask(features) * self.norm(features)


@plain("recommender")
def mask_net() -> tuple[nn.Module, Inputs]:
    """Return one serial mask block."""
    width = _ALL * WIDTH
    rest = nn.Sequential(nn.Flatten(), MaskedInteraction(width), PerceptronTower(width, 32, 1))
    return Scored(rest), visits()


class GatedCrossInteraction(nn.Module):
    """x0 * (W x + b) * sigmoid(G x) + x (GDCN, Wang et al. 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross, self.gate = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return first * self.cross(state) * torch.sigmoid(self.gate(state)) + state


class GatedCrosses(nn.Module):
    """Two gated cross layers."""

    def __init__(self) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(GatedCrossInteraction(FIELDS * WIDTH) for _ in range(2))
        self.score = nn.Linear(FIELDS * WIDTH, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state = first = features.flatten(1)
        for cross in self.crosses:
            state = cross(first, state)
        return self.score(state)


enter("recommender", "gated_cross_network", lambda: (Recommender(Tables(), GatedCrosses()), visits(dense=False)))


class PairwiseInteraction(nn.Module):
    """A matrix per pair of fields between their rows (FiBiNET, Huang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(i, j) for i in range(FIELDS) for j in range(i + 1, FIELDS)]
        self.register_buffer("left", torch.tensor([i for i, _ in pairs]))
        self.register_buffer("right", torch.tensor([j for _, j in pairs]))
        self.weights = nn.Parameter(torch.randn(len(pairs), WIDTH, WIDTH) / WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        left = torch.einsum("bpi,pij->bpj", features[:, self.left], self.weights)
        return left * features[:, self.right]


class Excitation(nn.Module):
    """Each field scaled by a network over all fields' means."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(FIELDS, 2), nn.ReLU(), nn.Linear(2, FIELDS), nn.ReLU())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.scale(features.mean(-1)).unsqueeze(-1)


class Fibinet(nn.Module):
    """Pairs of original and scaled rows."""

    def __init__(self) -> None:
        super().__init__()
        self.excitation, self.plain, self.scaled = Excitation(), PairwiseInteraction(), PairwiseInteraction()
        self.deep = PerceptronTower(FIELDS * (FIELDS - 1) * WIDTH, 16, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.plain(features), self.scaled(self.excitation(features))], 1)
        return self.deep(both.flatten(1))


enter("recommender", "fibinet", lambda: (Recommender(Tables(), Fibinet()), visits(dense=False)))
