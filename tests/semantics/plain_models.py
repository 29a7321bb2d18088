"""Plain torch modules, as people write them: recommenders, networks, autoencoders, nn.Transformer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from building import Architecture, Inputs, Make, numbers
from torch import nn
from torch.nn import functional

PLAIN: dict[str, Architecture] = {}
FIELDS, ROWS, WIDTH = 5, 50, 8


def plain(kind: str) -> Callable[[Make], Make]:
    """Decorator: the function, by its name, is one of them."""

    def register(make: Make) -> Make:
        PLAIN[make.__name__] = Architecture(make.__name__, kind, make)
        return make

    return register


class PerceptronTower(nn.Sequential):
    """Linear layers with activations between."""

    def __init__(self, *widths: int, last: type[nn.Module] | None = None) -> None:
        layers: list[nn.Module] = []
        for one, other in itertools.pairwise(widths):
            layers += [nn.Linear(one, other), nn.ReLU()]
        super().__init__(*layers[:-1], *([last()] if last else []))


class DotInteraction(nn.Module):
    """The products of all pairs of features (DLRM)."""

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        features = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(features.shape[1], features.shape[1], offset=-1, device=dense.device)
        return torch.cat([dense, products[:, rows, columns]], dim=1)


class FactorizationMachine(nn.Module):
    """Half of the square of the sum less the sum of the squares (DeepFM)."""

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
    """Scores, and the loss where it is known who clicked."""
    output = {"logits": score}
    if labels is not None:
        output["loss"] = functional.binary_cross_entropy_with_logits(score.squeeze(-1), labels)
    return output


def visits(dense: bool = True) -> Inputs:
    """Four people, what they did, and whether they clicked."""
    fields = torch.randint(0, ROWS, (4, FIELDS), generator=torch.Generator().manual_seed(0))
    given = {"fields": fields, "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    return given | ({"dense": numbers(4, 6)} if dense else {})


class DLRM(nn.Module):
    """Bags of features and a dense tower meet in products."""

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


@plain("recommender")
def dlrm() -> tuple[nn.Module, Inputs]:
    """DLRM."""
    return DLRM(), visits()
