"""Hand-written torch modules: recommenders, networks, autoencoders, nn.Transformer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from evaluation.zoo.building import Architecture, Inputs, Make, numbers

PLAIN: dict[str, Architecture] = {}
FIELDS, ROWS, WIDTH = 5, 50, 8


def enter(kind: str, name: str, make: Make) -> None:
    """Add an entry. `make` returns the model and its inputs."""
    PLAIN[name] = Architecture(name, kind, make)


def plain(kind: str) -> Callable[[Make], Make]:
    """Decorator: add the function to the entries, by its name."""

    def register(make: Make) -> Make:
        enter(kind, make.__name__, make)
        return make

    return register


class PerceptronTower(nn.Sequential):
    """Linear layers with activations between them."""

    def __init__(self, *widths: int, last: type[nn.Module] | None = None) -> None:
        layers: list[nn.Module] = []
        for one, other in itertools.pairwise(widths):
            layers += [nn.Linear(one, other), nn.ReLU()]
        super().__init__(*layers[:-1], *([last()] if last else []))


class DotInteraction(nn.Module):
    """Dot products of all pairs of features (DLRM)."""

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        features = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(features.shape[1], features.shape[1], offset=-1, device=dense.device)
        return torch.cat([dense, products[:, rows, columns]], dim=1)


class FactorizationMachine(nn.Module):
    """Factorization machine: half of the square of the sum minus the sum of squares (DeepFM)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 0.5 * (features.sum(1).square() - features.square().sum(1)).sum(1, keepdim=True)


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x (DCN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return first * self.linear(state) + state


def clicked(score: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the scores, with the loss if labels are given."""
    output = {"logits": score}
    if labels is not None:
        output["loss"] = functional.binary_cross_entropy_with_logits(score.squeeze(-1), labels)
    return output


def visits(dense: bool = True) -> Inputs:
    """Return features and clicks of four users."""
    fields = torch.randint(0, ROWS, (4, FIELDS), generator=torch.Generator().manual_seed(0))
    options = {"fields": fields, "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    return options | ({"dense": numbers(4, 6)} if dense else {})


class DLRM(nn.Module):
    """DLRM: embedding bags and a dense tower, combined by dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(FIELDS))
        self.bottom = PerceptronTower(6, 16, WIDTH)
        self.interaction = DotInteraction()
        self.top = PerceptronTower(WIDTH + (FIELDS + 1) * FIELDS // 2, 16, 1)

    def forward(
        self, fields: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        sparse = torch.stack([bag(fields[:, i : i + 1]) for i, bag in enumerate(self.bags)], dim=1)
        return clicked(self.top(self.interaction(self.bottom(dense), sparse)), labels)


enter("recommender", "dlrm", lambda: (DLRM(), visits()))


class WideAndDeep(nn.Module):
    """A linear model of crossed features beside a network over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.wide = nn.EmbeddingBag(ROWS, 1, mode="sum")
        self.deep = PerceptronTower(FIELDS * WIDTH + 6, 32, 16, 1)

    def forward(
        self, fields: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        looked_up = [table(fields[:, i]) for i, table in enumerate(self.tables)]
        return clicked(self.wide(fields) + self.deep(torch.cat([*looked_up, dense], dim=1)), labels)


enter("recommender", "wide_and_deep", lambda: (WideAndDeep(), visits()))


class DeepFM(nn.Module):
    """A factorization machine and a network over the same embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.first = nn.ModuleList(nn.Embedding(ROWS, 1) for _ in range(FIELDS))
        self.machine = FactorizationMachine()
        self.deep = PerceptronTower(FIELDS * WIDTH, 32, 1)

    def forward(self, fields: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        features = torch.stack([table(fields[:, i]) for i, table in enumerate(self.tables)], dim=1)
        linear = torch.stack([table(fields[:, i]) for i, table in enumerate(self.first)], dim=1).sum(1)
        return clicked(linear + self.machine(features) + self.deep(features.flatten(1)), labels)


enter("recommender", "deepfm", lambda: (DeepFM(), visits(dense=False)))


class CrossNetwork(nn.Module):
    """A cross network beside a deep network over embeddings (DCN v2)."""

    def __init__(self) -> None:
        super().__init__()
        width = FIELDS * WIDTH + 6
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))
        self.crosses = nn.ModuleList(CrossLayer(width) for _ in range(2))
        self.deep = PerceptronTower(width, 32, 16)
        self.score = nn.Linear(width + 16, 1)

    def forward(
        self, fields: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        first = torch.cat([*(table(fields[:, i]) for i, table in enumerate(self.tables)), dense], dim=1)
        state = first
        for cross in self.crosses:
            state = cross(first, state)
        return clicked(self.score(torch.cat([state, self.deep(first)], dim=1)), labels)


enter("recommender", "cross_network", lambda: (CrossNetwork(), visits()))


class TowerInteraction(nn.Module):
    """Similarity of the outputs of two towers, all pairs in a batch."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T


class TwoTowers(nn.Module):
    """A user tower and an item tower; their dot product is the score."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(200, WIDTH), nn.Embedding(300, WIDTH)
        self.history = nn.EmbeddingBag(300, WIDTH, mode="mean")
        self.left, self.right = PerceptronTower(2 * WIDTH, 32, 16), PerceptronTower(WIDTH, 32, 16)
        self.interaction = TowerInteraction()

    def forward(
        self, person: torch.Tensor, thing: torch.Tensor, history: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        left = self.left(torch.cat([self.people(person), self.history(history)], dim=1))
        right = self.right(self.things(thing))
        scores = self.interaction(left, right)
        output = {"logits": scores}
        if labels is not None:
            output["loss"] = functional.cross_entropy(scores / 0.1, labels)
        return output


@plain("recommender")
def two_towers() -> tuple[nn.Module, Inputs]:
    """Return two towers."""
    options = {"person": torch.tensor([3, 14, 15, 92]), "thing": torch.tensor([6, 53, 58, 97])}
    history = torch.randint(0, 300, (4, 6), generator=torch.Generator().manual_seed(0))
    return TwoTowers(), options | {"history": history, "labels": torch.arange(4)}


class RowInteraction(nn.Module):
    """The elementwise product of two rows."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left * right


class NeuralFiltering(nn.Module):
    """The product of embeddings beside a network over them (NeuMF)."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(200, WIDTH), nn.Embedding(300, WIDTH)
        self.other_people, self.other_things = nn.Embedding(200, WIDTH), nn.Embedding(300, WIDTH)
        self.interaction = RowInteraction()
        self.deep = PerceptronTower(2 * WIDTH, 16, 8)
        self.score = nn.Linear(WIDTH + 8, 1)

    def forward(
        self, person: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        product = self.interaction(self.people(person), self.things(thing))
        deep = self.deep(torch.cat([self.other_people(person), self.other_things(thing)], dim=1))
        return clicked(self.score(torch.cat([product, deep], dim=1)), labels)


@plain("recommender")
def neural_filtering() -> tuple[nn.Module, Inputs]:
    """Return NeuMF."""
    options = {"person": torch.tensor([3, 14, 15, 92]), "thing": torch.tensor([6, 53, 58, 97])}
    return NeuralFiltering(), options | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}
