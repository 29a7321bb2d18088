"""Recommenders of people and things: factors, towers, histories. Labels come from classes, as in `recommender_models`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import WIDTH, PerceptronTower, clicked, plain
from evaluation.semantics.recommender_models import ITEMS, HistoryPooling
from evaluation.zoo.building import Inputs

PEOPLE = 200


def _pairs() -> Inputs:
    given = {"person": torch.tensor([3, 14, 15, 92]), "thing": torch.tensor([6, 53, 58, 97])}
    return given | {"labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


def _histories(length: int = 6) -> Inputs:
    history = torch.randint(1, ITEMS, (4, length), generator=torch.Generator().manual_seed(0))
    return {"history": history, "thing": torch.tensor([6, 53, 58, 97]), "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class FactorInteraction(nn.Module):
    """The inner product of two rows."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left * right).sum(-1, keepdim=True)


class BatchInteraction(nn.Module):
    """The inner products of all in a batch with all."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T


class CosineInteraction(nn.Module):
    """Similarity of two rows."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return functional.cosine_similarity(left, right, dim=-1).unsqueeze(-1)


class Factors(nn.Module):
    """A row for each person and each thing, with or without what each is like on average."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(PEOPLE, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.biases = nn.ModuleList([nn.Embedding(PEOPLE, 1), nn.Embedding(ITEMS, 1)]) if biased else None
        self.interaction = FactorInteraction()

    def forward(
        self, person: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        score = self.interaction(self.people(person), self.things(thing))
        if self.biases is not None:
            score = score + self.biases[0](person) + self.biases[1](thing)
        return clicked(score, labels)


@plain("recommender")
def matrix_factorization() -> tuple[nn.Module, Inputs]:
    """Matrix factorisation."""
    return Factors(biased=False), _pairs()


@plain("recommender")
def matrix_factorization_bias() -> tuple[nn.Module, Inputs]:
    """Matrix factorisation with biases."""
    return Factors(biased=True), _pairs()


class DistanceInteraction(nn.Module):
    """Distance of two rows."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left - right).square().sum(-1, keepdim=True)


class Distance(nn.Module):
    """Distance of a user and an item (collaborative metric learning)."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(PEOPLE, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.interaction, self.score = DistanceInteraction(), nn.Linear(1, 1)

    def forward(
        self, person: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return clicked(self.score(-self.interaction(self.people(person), self.things(thing))), labels)


@plain("recommender")
def collaborative_metric() -> tuple[nn.Module, Inputs]:
    """Distances."""
    return Distance(), _pairs()


class Alike(nn.Module):
    """Two things through one tower (item to item)."""

    def __init__(self) -> None:
        super().__init__()
        self.things, self.tower = nn.Embedding(ITEMS, WIDTH), PerceptronTower(WIDTH, 32, 16)
        self.interaction = CosineInteraction()

    def forward(
        self, person: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        left, right = (self.tower(self.things(ids)) for ids in (person, thing))
        return clicked(self.interaction(left, right), labels)


@plain("recommender")
def item_to_item() -> tuple[nn.Module, Inputs]:
    """Item to item."""
    return Alike(), _pairs()


class Watching(nn.Module):
    """Mean of the videos that a user watched, through a tower, against all that is in the batch (YouTube)."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.things = HistoryPooling(), nn.Embedding(ITEMS, 16)
        self.tower, self.interaction = PerceptronTower(WIDTH, 32, 16), BatchInteraction()

    def forward(
        self, history: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        scores = self.interaction(self.tower(self.history(history)), self.things(thing))
        output = {"logits": scores}
        if labels is not None:
            output["loss"] = functional.cross_entropy(scores, torch.arange(4, device=scores.device))
        return output


@plain("recommender")
def youtube_dnn() -> tuple[nn.Module, Inputs]:
    """Candidates."""
    return Watching(), _histories()


class Sequence(nn.Module):
    """A history through a network that knows its order, and how well a thing fits (SASRec, GRU4Rec)."""

    def __init__(self, layers: nn.Module, positions: bool) -> None:
        super().__init__()
        self.things = nn.Embedding(ITEMS, 16)
        self.positions = nn.Embedding(10, 16) if positions else None
        self.layers = layers
        self.interaction = FactorInteraction()

    def forward(
        self, history: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        state = self.things(history)
        if self.positions is not None:
            state = state + self.positions(torch.arange(history.shape[1], device=history.device))
            state = self.layers(state)
        else:
            state = self.layers(state)[0]
        return clicked(self.interaction(state[:, -1], self.things(thing)), labels)


@plain("recommender")
def sasrec() -> tuple[nn.Module, Inputs]:
    """SASRec."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return Sequence(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), positions=True), _histories()


@plain("recommender")
def gru4rec() -> tuple[nn.Module, Inputs]:
    """GRU4Rec."""
    return Sequence(nn.GRU(16, 16, batch_first=True), positions=False), _histories()


class CandidateInteraction(nn.Module):
    """Weight of each item of a history for a candidate: it beside the candidate, their difference and product (DIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = PerceptronTower(4 * WIDTH, 16, 1)

    def forward(self, history: torch.Tensor, thing: torch.Tensor) -> torch.Tensor:
        candidate = thing.unsqueeze(1).expand_as(history)
        weight = self.weigh(torch.cat([history, candidate, history - candidate, history * candidate], -1))
        return (weight * history).sum(1)


class Interested(nn.Module):
    """DIN."""

    def __init__(self) -> None:
        super().__init__()
        self.things = nn.Embedding(ITEMS, WIDTH)
        self.interaction, self.deep = CandidateInteraction(), PerceptronTower(2 * WIDTH, 16, 1)

    def forward(
        self, history: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        candidate = self.things(thing)
        interest = self.interaction(self.things(history), candidate)
        return clicked(self.deep(torch.cat([interest, candidate], 1)), labels)


@plain("recommender")
def deep_interest() -> tuple[nn.Module, Inputs]:
    """DIN."""
    return Interested(), _histories()
