"""Hand-written recommenders. Labels come from classes.

A class whose name ends with `Interaction` is exactly a feature interaction. One whose name ends with `Pooling` is
exactly a look-up with a reduction.
"""

from __future__ import annotations

import torch
from torch import nn

from evaluation.semantics.plain_models import FIELDS, ROWS, WIDTH, PerceptronTower, clicked, enter, plain, visits
from evaluation.zoo.building import Inputs, numbers

ITEMS = 300


class Tables(nn.Module):
    """One table per field; the rows are stacked."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(FIELDS))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)


class OneTable(nn.Module):
    """One table with a row range per field."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Embedding(FIELDS * ROWS, width)
        self.register_buffer("offsets", torch.arange(FIELDS) * ROWS)

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return self.table(fields + self.offsets)


class FirstOrderPooling(OneTable):
    """A weight per id, summed: the linear part of a factorization machine."""

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
    """Factorization machine: half of the square of the sum minus the sum of squares."""

    def __init__(self, total: bool = True) -> None:
        super().__init__()
        self.total = total

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        square_of_sum = torch.sum(features, dim=1) ** 2
        sum_of_squares = torch.sum(features**2, dim=1)
        both = 0.5 * (square_of_sum - sum_of_squares)
        return both.sum(1, keepdim=True) if self.total else both


class Recommender(nn.Module):
    """Features through a model to a score."""

    def __init__(self, embedding: nn.Module, rest: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding, self.rest, self.first = embedding, rest, first

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        score = self.rest(self.embedding(fields))
        return clicked(score + self.first(fields) if self.first is not None else score, labels)


def _clicks() -> Inputs:
    return visits(dense=False)


enter(
    "recommender",
    "factorization_machine",
    lambda: (Recommender(OneTable(), MachineInteraction(), FirstOrderPooling()), _clicks()),
)
enter(
    "recommender",
    "one_table_fm",
    lambda: (Recommender(OneTable(), nn.Sequential(MachineInteraction(total=False), nn.Linear(WIDTH, 1))), _clicks()),
)


@plain("recommender")
def neural_fm() -> tuple[nn.Module, Inputs]:
    """Return NFM: a network over the bi-interaction."""
    network = nn.Sequential(MachineInteraction(total=False), nn.BatchNorm1d(WIDTH), PerceptronTower(WIDTH, 16, 1))
    return Recommender(Tables(), network, FirstOrderPooling()), _clicks()


class Bags(nn.Module):
    """DLRM with bags of several ids, given as lists with offsets."""

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
    """As in Facebook's DLRM: a batched product and its lower triangle."""

    def forward(self, dense: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        batch, width = dense.shape
        features = torch.cat([dense, *rows], 1).view(batch, -1, width)
        products = torch.bmm(features, torch.transpose(features, 1, 2))
        below = [(i, j) for i in range(products.shape[1]) for j in range(i)]
        rows_of, columns_of = (torch.tensor(part, device=dense.device) for part in zip(*below, strict=True))
        return torch.cat([dense, products[:, rows_of, columns_of]], 1)


@plain("recommender")
def dlrm_offsets() -> tuple[nn.Module, Inputs]:
    """Return DLRM as published."""
    ids = torch.randint(0, ROWS, (3, 12), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([[0, 2, 5, 9], [0, 3, 4, 8], [0, 1, 6, 10]])
    given = {"ids": ids, "starts": starts, "dense": numbers(4, 6)}
    return Bags(), given | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class PooledTables(nn.Module):
    """DLRM whose fields have several ids, looked up and summed."""

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
    """Return DLRM with many ids per field."""
    lists = torch.randint(0, ITEMS, (4, 3, 5), generator=torch.Generator().manual_seed(0))
    return PooledTables(), {"lists": lists, "dense": numbers(4, 6), "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class Deep(nn.Module):
    """A residual network over features (Deep Crossing)."""

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


enter("recommender", "deep_crossing", lambda: (Recommender(Tables(), Deep()), _clicks()))


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


enter("recommender", "mixture_of_tasks", lambda: (Recommender(Tables(), Experts()), _clicks()))
