"""Further recommenders, as they are written elsewhere: towers, crosses, masks. Labels come from classes, as in `recommender_models`."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import FIELDS, ROWS, WIDTH, PerceptronTower, clicked, plain, visits
from evaluation.semantics.recommender_models import (
    ITEMS,
    FirstOrderPooling,
    HistoryPooling,
    MachineInteraction,
    OneTable,
    Recommender,
    Tables,
)
from evaluation.zoo.building import Inputs

_FLAT = FIELDS * WIDTH
_PAIRS = list(itertools.combinations(range(FIELDS), 2))


def _clicks() -> Inputs:
    return visits(dense=False)


def _chosen(length: int = 6) -> Inputs:
    history = torch.randint(1, ITEMS, (4, length), generator=torch.Generator().manual_seed(0))
    return {"history": history, "thing": torch.tensor([6, 53, 58, 97]), "labels": torch.tensor([0.0, 1.0, 1.0, 0.0])}


class SideBySide(nn.Module):
    """A table for each field; their rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(FIELDS))

    def forward(self, fields: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(fields[:, i]) for i, table in enumerate(self.tables)], 1)


class EinsumInteraction(nn.Module):
    """The products of all pairs, flat."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bfd,bgd->bfg", features, features).flatten(1)


@plain("recommender")
def einsum_products() -> tuple[nn.Module, Inputs]:
    """DLRM with Einstein's sums."""
    return Recommender(OneTable(), nn.Sequential(EinsumInteraction(), PerceptronTower(FIELDS**2, 16, 1))), _clicks()


class CompressedDotInteraction(nn.Module):
    """The products of all features with fewer mixtures of them (DotCompress)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(FIELDS, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.bmm(features, self.mix(features.transpose(1, 2))).flatten(1)


@plain("recommender")
def compressed_products() -> tuple[nn.Module, Inputs]:
    """DLRM with compressed products."""
    network = nn.Sequential(CompressedDotInteraction(), PerceptronTower(FIELDS * 3, 16, 1))
    return Recommender(Tables(), network), _clicks()


class ConvolvedInteraction(nn.Module):
    """CIN by convolutions of one, as most write it."""

    def __init__(self, maps: int = 6, layers: int = 2) -> None:
        super().__init__()
        widths = [FIELDS, *[maps] * layers]
        self.layers = nn.ModuleList(nn.Conv1d(FIELDS * w, maps, 1) for w in widths[:-1])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        first, state, sums = features.unsqueeze(2), features, []
        for layer in self.layers:
            product = first * state.unsqueeze(1)
            batch, one, other, width = product.shape
            state = functional.relu(layer(product.view(batch, one * other, width)))
            sums.append(torch.sum(state, 2))
        return torch.cat(sums, 1)


@plain("recommender")
def convolved_products() -> tuple[nn.Module, Inputs]:
    """xDeepFM with convolutions."""
    return Recommender(
        Tables(), nn.Sequential(ConvolvedInteraction(), nn.Linear(12, 1)), FirstOrderPooling()
    ), _clicks()


class GatheredInteraction(nn.Module):
    """Inner products of rows that are gathered in two stacks (PNN)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        left = torch.stack([features[:, i] for i, _ in _PAIRS], 1)
        right = torch.stack([features[:, j] for _, j in _PAIRS], 1)
        return (left * right).sum(-1)


@plain("recommender")
def gathered_products() -> tuple[nn.Module, Inputs]:
    """IPNN."""
    return Recommender(Tables(), nn.Sequential(GatheredInteraction(), PerceptronTower(len(_PAIRS), 16, 1))), _clicks()


class OuterInteraction(nn.Module):
    """The outer product of the sum of the features with itself (OPNN)."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = features.sum(1)
        return torch.bmm(total.unsqueeze(2), total.unsqueeze(1)).flatten(1)


@plain("recommender")
def outer_products() -> tuple[nn.Module, Inputs]:
    """OPNN."""
    return Recommender(Tables(), nn.Sequential(OuterInteraction(), PerceptronTower(WIDTH**2, 16, 1))), _clicks()


class MaskedInteraction(nn.Module):
    """Features times a mask that a network over them makes (MaskNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_FLAT)
        self.mask = nn.Sequential(nn.Linear(_FLAT, 64), nn.ReLU(), nn.Linear(64, _FLAT))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.mask(features) * self.norm(features)


@plain("recommender")
def masked_features() -> tuple[nn.Module, Inputs]:
    """MaskNet."""
    return Recommender(SideBySide(), nn.Sequential(MaskedInteraction(), PerceptronTower(_FLAT, 16, 1))), _clicks()


class ColumnInteraction(nn.Module):
    """DCN with columns: matrices stand left of what they are multiplied with."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.randn(_FLAT, _FLAT) * 0.1 for _ in range(layers))
        self.bias = nn.ParameterList(torch.zeros(_FLAT, 1) for _ in range(layers))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        first = features.unsqueeze(2)
        state = first
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            state = first * (torch.matmul(kernel, state) + bias) + state
        return state.squeeze(2)


class GatedInteraction(nn.Module):
    """GDCN: a cross whose layer is gated."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.gate = nn.Linear(_FLAT, _FLAT), nn.Linear(_FLAT, _FLAT, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.cross(features) * torch.sigmoid(self.gate(features)) + features


@plain("recommender")
def column_crosses() -> tuple[nn.Module, Inputs]:
    """DCN-M."""
    return Recommender(SideBySide(), nn.Sequential(ColumnInteraction(1), nn.Linear(_FLAT, 1))), _clicks()


@plain("recommender")
def gated_crosses() -> tuple[nn.Module, Inputs]:
    """GDCN."""
    return Recommender(SideBySide(), nn.Sequential(GatedInteraction(), PerceptronTower(_FLAT, 16, 1))), _clicks()


class Valued(nn.Module):
    """Rows times how much of each there is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.machine = OneTable(), MachineInteraction()
        self.linear = nn.Embedding(FIELDS * ROWS, 1)

    def forward(
        self, fields: torch.Tensor, amounts: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return clicked(self.machine(self.table(fields) * amounts.unsqueeze(-1)), labels)


@plain("recommender")
def valued_fm() -> tuple[nn.Module, Inputs]:
    """FM over features with values."""
    return Valued(), _clicks() | {"amounts": torch.rand(4, FIELDS, generator=torch.Generator().manual_seed(1))}


class SeenInteraction(nn.Module):
    """A candidate beside each item of a user's history: both, their difference and their product (DIN)."""

    def forward(self, history: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        query = candidate.unsqueeze(1).expand_as(history)
        return torch.cat([query, history, query - history, query * history], -1)


class StateInteraction(nn.Module):
    """Bilinear scores of states and a candidate (DIEN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH, bias=False)

    def forward(self, states: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        return torch.matmul(self.layer(states), candidate.unsqueeze(2)).squeeze(2)


class Evolving(nn.Module):
    """A user's history, by attention of a candidate over it, with or without a recurrence."""

    def __init__(self, recurrence: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.states = nn.GRU(WIDTH, 16, batch_first=True) if recurrence else None
        self.meeting: nn.Module = StateInteraction(16) if recurrence else SeenInteraction()
        self.score = PerceptronTower(4 * WIDTH, 8, 1)
        self.top = PerceptronTower((16 if recurrence else WIDTH) + WIDTH, 16, 1)

    def forward(
        self, history: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        rows, candidate = self.table(history), self.table(thing)
        states = self.states(rows)[0] if self.states is not None else rows
        met = self.meeting(states, candidate)
        scores = met if self.states is not None else self.score(met).squeeze(-1)
        weights = scores.masked_fill(history == 0, -1e9).softmax(-1)
        interest = (weights.unsqueeze(-1) * states).sum(1)
        return clicked(self.top(torch.cat([interest, candidate], -1)), labels)


@plain("recommender")
def interest_network() -> tuple[nn.Module, Inputs]:
    """DIN."""
    return Evolving(recurrence=False), _chosen()


@plain("recommender")
def interest_evolution() -> tuple[nn.Module, Inputs]:
    """DIEN."""
    return Evolving(recurrence=True), _chosen()


class NegativesInteraction(nn.Module):
    """Scores of one vector with several rows."""

    def forward(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.bmm(rows, state.unsqueeze(2)).squeeze(2)


class BilinearFormInteraction(nn.Module):
    """PyTorch's bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left * right).sum(1, keepdim=True) + self.form(left, right)


class Sampled(nn.Module):
    """Histories through a tower, against one thing and some that were not chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.things = HistoryPooling(), nn.Embedding(ITEMS, WIDTH)
        self.tower, self.meeting = PerceptronTower(WIDTH, 16, WIDTH), NegativesInteraction()

    def forward(
        self, history: torch.Tensor, thing: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        rows = self.things(torch.stack([thing, (thing + 7) % ITEMS, (thing + 31) % ITEMS], 1))
        return clicked(self.meeting(self.tower(self.history(history)), rows)[:, :1], labels)


@plain("recommender")
def sampled_negatives() -> tuple[nn.Module, Inputs]:
    """Two towers with negatives."""
    return Sampled(), _chosen()


class Expert(nn.Module):
    """PLE: experts of tasks and experts of all, with gates; no features meet."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList(PerceptronTower(_FLAT, 16) for _ in range(2))
        self.own = nn.ModuleList(PerceptronTower(_FLAT, 16) for _ in range(2))
        self.gate, self.tower = nn.Linear(_FLAT, 4), nn.Linear(16, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        made = torch.stack([e(features) for e in (*self.shared, *self.own)], 1)
        return self.tower((self.gate(features).softmax(-1).unsqueeze(-1) * made).sum(1))


@plain("recommender")
def layered_extraction() -> tuple[nn.Module, Inputs]:
    """PLE."""
    return Recommender(SideBySide(), Expert()), _clicks()


class AttentionOverFieldsInteraction(nn.Module):
    """AutoInt with products of parameters, heads apart and what came in added."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.rest = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        query, key, value = (torch.tensordot(features, w, dims=([-1], [0])) for w in (self.query, self.key, self.value))
        query, key, value = (torch.stack(torch.split(x, WIDTH // self.heads, dim=2)) for x in (query, key, value))
        weights = torch.einsum("hbik,hbjk->hbij", query, key).softmax(-1)
        result = torch.matmul(weights, value)
        result = torch.cat(torch.split(result, 1), dim=-1).squeeze(0)
        return functional.relu(result + features @ self.rest)


@plain("recommender")
def written_autoint() -> tuple[nn.Module, Inputs]:
    """AutoInt."""
    return Recommender(
        Tables(), nn.Sequential(AttentionOverFieldsInteraction(), nn.Flatten(1), nn.Linear(_FLAT, 1))
    ), _clicks()
