"""Hand-written torch modules that no matcher was developed on, as in their papers: half of the part `unseen`.

Classes that end with `Attention`, `Interaction`, `Pooling` or `Recurrence` are labelled so; see README.md.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import PLAIN, PerceptronTower, enter, plain
from evaluation.semantics.plain_networks import Wrapped, with_loss
from evaluation.zoo.building import Inputs, labelled_image, numbers, words

__all__ = ["PLAIN"]

_VOCABULARY, _WIDTH, _HEADS, _LENGTH = 640, 32, 4, 16
_HEAD = _WIDTH // _HEADS


def _written(length: int = _LENGTH) -> Inputs:
    return {"inputs": words(length=length), "labels": words(1, length)}


# --- attention other than softmax(QK)V over all positions ---
class HeadsAttention(nn.Module):
    """Multi-head projections; a subclass implements the mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (_HEADS, _HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the mixed values of shape (batch, heads, positions, head width)."""
        raise NotImplementedError


class PerformerAttention(HeadsAttention):
    """Softmax kernel by positive orthogonal random features (Choromanski et al. 2021)."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(features, _HEAD))

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        x = x * _HEAD**-0.25
        projected = x @ self.directions.T
        norm = x.square().sum(-1, keepdim=True) / 2
        return (projected - norm - projected.amax(-1, keepdim=True)).exp() + 1e-4

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = self._features(query), self._features(key)
        scale = 1 / torch.einsum("bhnf,bhf->bhn", query, key.sum(2))
        context = torch.einsum("bhnf,bhnd->bhfd", key, value)
        return torch.einsum("bhfd,bhnf,bhn->bhnd", context, query, scale)


class ElementwiseLinearAttention(HeadsAttention):
    """Kernel elu + 1 (Katharopoulos et al. 2020), not causal."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        state = key.transpose(-1, -2) @ value
        return (query @ state) / ((query @ key.sum(2).unsqueeze(-1)) + 1e-6)


class CosineReweightedAttention(HeadsAttention):
    """ReLU features, weighted by the cosine of the distance (cosFormer, Qin et al. 2022)."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length = query.shape[2]
        places = math.pi / 2 * torch.arange(length, device=query.device)[:, None] / length
        query, key = query.relu(), key.relu()
        query = torch.cat([query * places.sin(), query * places.cos()], -1)
        key = torch.cat([key * places.sin(), key * places.cos()], -1)
        scale = 1 / torch.clamp_min(torch.einsum("bhnd,bhd->bhn", query, key.sum(2)), 1e-6)
        return torch.einsum("bhnd,bhdm,bhn->bhnm", query, torch.einsum("bhnd,bhnm->bhdm", key, value), scale)


class EfficientAttention(HeadsAttention):
    """Softmax over features of queries and over positions of keys (Shen et al. 2021)."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        context = key.softmax(2).transpose(-1, -2) @ value
        return query.softmax(-1) @ context


class LinformerAttention(HeadsAttention):
    """Keys and values projected to fewer positions (Wang et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.shorter_keys, self.shorter_values = nn.Linear(_LENGTH, 4, bias=False), nn.Linear(_LENGTH, 4, bias=False)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = self.shorter_keys(key.transpose(-1, -2))
        value = self.shorter_values(value.transpose(-1, -2)).transpose(-1, -2)
        return (query @ key * _HEAD**-0.5).softmax(-1) @ value


class DilatedAttention(HeadsAttention):
    """Segments in which every second position attends (LongNet, Ding et al. 2023)."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, width = query.shape
        sparse = [x.view(batch, heads, length // 8, 8, width)[:, :, :, ::2] for x in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*sparse)
        whole = torch.zeros(batch, heads, length // 8, 8, width, device=query.device)
        whole[:, :, :, ::2] = mixed
        return whole.flatten(2, 3)


class SlidingWindowAttention(HeadsAttention):
    """Each block of positions attends to itself and its neighbours, gathered by `unfold`."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        block = 4
        padded = [functional.pad(x, (0, 0, block, block)).unfold(2, 3 * block, block) for x in (key, value)]
        key, value = (x.transpose(-1, -2) for x in padded)
        query = query.unflatten(2, (-1, block))
        scores = query @ key.transpose(-1, -2) * _HEAD**-0.5
        places = torch.arange(query.shape[2], device=query.device)[:, None] * block
        beside = torch.arange(-block, 2 * block, device=query.device)[None] + places
        outside = (beside < 0) | (beside >= query.shape[2] * block)
        return (scores.masked_fill(outside[:, None], -1e4).softmax(-1) @ value).flatten(2, 3)


class TalkingHeadsAttention(HeadsAttention):
    """Heads are mixed before and after the softmax (Shazeer et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.eye(_HEADS)), nn.Parameter(torch.eye(_HEADS))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bhnm,hk->bknm", query @ key.transpose(-1, -2) * _HEAD**-0.5, self.before)
        return torch.einsum("bhnm,hk->bknm", scores.softmax(-1), self.after) @ value


class MLP(nn.Module):
    """Feed-forward network: two linear layers with an activation."""

    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class EncoderBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(_WIDTH), attention, nn.LayerNorm(_WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class WordEncoder(nn.Module):
    """Word encoder: embeddings, two blocks, logits."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(64, _WIDTH)
        self.blocks, self.norm = nn.Sequential(EncoderBlock(kind()), EncoderBlock(kind())), nn.LayerNorm(_WIDTH)
        self.scores = nn.Linear(_WIDTH, _VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that turns features into logits."""
        return self.scores

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embedding."""
        return self.words

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        return with_loss(self.scores(self.norm(self.blocks(x))), labels)


enter("encoder", "performer", lambda: (WordEncoder(PerformerAttention), _written()))
enter("encoder", "linear_transformer", lambda: (WordEncoder(ElementwiseLinearAttention), _written()))
enter("encoder", "cosformer", lambda: (WordEncoder(CosineReweightedAttention), _written()))
enter("encoder", "efficient_attention", lambda: (WordEncoder(EfficientAttention), _written()))
enter("encoder", "linformer", lambda: (WordEncoder(LinformerAttention), _written()))
enter("encoder", "longnet", lambda: (WordEncoder(DilatedAttention), _written()))
enter("encoder", "sliding_window", lambda: (WordEncoder(SlidingWindowAttention), _written()))
enter("encoder", "talking_heads", lambda: (WordEncoder(TalkingHeadsAttention), _written()))


class LineAttention(nn.Module):
    """Attention along one side of an image."""

    def __init__(self, along_rows: bool) -> None:
        super().__init__()
        self.along_rows = along_rows
        self.inner = nn.MultiheadAttention(_WIDTH, _HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.along_rows else x.transpose(1, 2)
        lines = x.flatten(0, 1)
        mixed = self.inner(lines, lines, lines, need_weights=False)[0].unflatten(0, x.shape[:2])
        return mixed if self.along_rows else mixed.transpose(1, 2)


class AxialBlock(nn.Module):
    """Axial attention over rows and columns, and a network (Ho et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(3))
        self.rows, self.columns, self.mlp = LineAttention(True), LineAttention(False), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, (self.rows, self.columns, self.mlp), strict=True):
            x = x + part(norm(x))
        return x


class Axial(nn.Module):
    """Classifier of patches with axial blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _WIDTH, 8, 8)
        self.blocks, self.head = nn.Sequential(AxialBlock(), AxialBlock()), nn.Linear(_WIDTH, 5)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.blocks(self.stem(pixel_values).permute(0, 2, 3, 1))
        return with_loss(self.head(x.mean((1, 2))), labels)


enter("vision", "axial_transformer", lambda: (Axial(), labelled_image()))


class SlotAttention(nn.Module):
    """Slots compete for positions (Locatello et al. 2020): softmax over slots, then a mean over positions; a GRU updates slots."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))

    def forward(self, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weights = (self.key(x) @ self.query(slots).transpose(1, 2) * _WIDTH**-0.5).softmax(-1) + 1e-8
        weights = weights / weights.sum(1, keepdim=True)
        return weights.transpose(1, 2) @ self.value(x)


class Slots(nn.Module):
    """An image's positions in four slots."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, _WIDTH, 5, 4, 2), nn.ReLU())
        self.start = nn.Parameter(torch.randn(1, 4, _WIDTH))
        self.attention, self.change, self.mlp = SlotAttention(), nn.GRUCell(_WIDTH, _WIDTH), MLP()
        self.norm_places, self.norm_slots, self.norm = (nn.LayerNorm(_WIDTH) for _ in range(3))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        places = self.norm_places(self.stem(pixel_values).flatten(2).transpose(1, 2))
        slots = self.start.expand(len(places), -1, -1)
        for _ in range(2):
            update = self.attention(self.norm_slots(slots), places)
            slots = self.change(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(self.norm(slots))
        return slots


enter("vision", "slot_attention", lambda: (Slots(), {"pixel_values": numbers(2, 3, 32, 32)}))


class NonLocalAttention(nn.Module):
    """Embedded Gaussian over all positions of a feature map (Wang et al. 2018), by pointwise convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(channels, channels // 2, 1) for _ in range(3))
        self.out = nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        mixed = torch.bmm(torch.bmm(query.transpose(1, 2), key).softmax(-1), value.transpose(1, 2))
        return x + self.out(mixed.transpose(1, 2).unflatten(2, x.shape[2:]))


@plain("vision")
def non_local_network() -> tuple[nn.Module, Inputs]:
    """Return a small network with a non-local block."""
    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), NonLocalAttention(16))
    rest = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return Wrapped(nn.Sequential(body, rest)), {"inputs": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


class AdditiveAttention(nn.Module):
    """v tanh(W s + U h) (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.places, self.score = nn.Linear(_WIDTH, 16), nn.Linear(_WIDTH, 16), nn.Linear(16, 1)

    def forward(self, state: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        scores = self.score(torch.tanh(self.state(state).unsqueeze(1) + self.places(places)))
        return (scores.softmax(1) * places).sum(1)


class Translator(nn.Module):
    """A GRU encoder, and a GRU cell decoder with attention at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.others = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(_VOCABULARY, _WIDTH)
        self.reader, self.writer = nn.GRU(_WIDTH, _WIDTH, batch_first=True), nn.GRUCell(2 * _WIDTH, _WIDTH)
        self.attention, self.scores = AdditiveAttention(), nn.Linear(_WIDTH, _VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that turns features into logits."""
        return self.scores

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        places, last = self.reader(self.words(inputs))
        state, states = last[0], []
        for i in range(targets.shape[1]):
            step = torch.cat([self.others(targets[:, i]), self.attention(state, places)], 1)
            state = self.writer(step, state)
            states.append(state)
        return with_loss(self.scores(torch.stack(states, 1)), labels)


enter("encoder", "bahdanau", lambda: (Translator(), {"inputs": words(), "targets": words(1, 4), "labels": words(2, 4)}))


class GatingUnit(nn.Module):
    """Half of the channels, mixed over positions, gate the others (gMLP, Liu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.places = nn.LayerNorm(_WIDTH), nn.Linear(_LENGTH, _LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return left * self.places(self.norm(right).transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    """Words through gating units."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _VOCABULARY)
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(_WIDTH, 2 * _WIDTH) for _ in range(2))
        self.units = nn.ModuleList(GatingUnit() for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that turns features into logits."""
        return self.scores

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.words(inputs)
        for norm, up, unit, down in zip(self.norms, self.ups, self.units, self.downs, strict=True):
            x = x + down(unit(functional.gelu(up(norm(x)))))
        return with_loss(self.scores(x), labels)


enter("encoder", "gmlp", lambda: (Gated(), _written()))


# --- images ---
def _stem(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())


def _classes(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


def _pictures() -> Inputs:
    return {"inputs": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


class AggregatedLayer(nn.Module):
    """A bottleneck with grouped convolutions (ResNeXt)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


enter(
    "vision",
    "resnext",
    lambda: (Wrapped(nn.Sequential(_stem(24), AggregatedLayer(24), AggregatedLayer(24), _classes(24))), _pictures()),
)


class SqueezeAndExcite(nn.Module):
    """Channels scaled by their own contents; not attention, because positions do not mix."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class MobileLayer(nn.Module):
    """Inverted residual with squeeze-and-excitation (MBConv of EfficientNet)."""

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            SqueezeAndExcite(wide), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


enter(
    "vision",
    "efficientnet_v1",
    lambda: (Wrapped(nn.Sequential(_stem(16), MobileLayer(16, 32), MobileLayer(16, 32), _classes(16))), _pictures()),
)


class GatesAttention(nn.Module):
    """A gate from a coarse map scales a fine one per position (Attention U-Net): positions do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.score = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 1, 1)

    def forward(self, fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
        return fine * torch.sigmoid(self.score(functional.relu(self.fine(fine) + self.coarse(coarse))))


class GatedUNet(nn.Module):
    """U-Net with gated skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.gate, self.up = GatesAttention(), nn.Upsample(scale_factor=2)
        self.last = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        fine = self.first(inputs)
        coarse = self.up(self.low(fine))
        return self.last(torch.cat([self.gate(fine, coarse), coarse], 1))


enter("vision", "attention_unet", lambda: (GatedUNet(), {"inputs": numbers(2, 3, 32, 32)}))


# --- sequences, graphs, points ---
class TemporalLayer(nn.Module):
    """Two causal, dilated convolutions with a residual connection (TCN, Bai et al. 2018)."""

    def __init__(self, one: int, other: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = nn.Conv1d(one, other, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(other, other, 3, dilation=dilation)
        self.around = nn.Conv1d(one, other, 1) if one != other else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.conv1(functional.pad(x, (self.pad, 0))))
        h = functional.relu(self.conv2(functional.pad(h, (self.pad, 0))))
        return functional.relu(h + self.around(x))


class Temporal(nn.Module):
    """Forecaster of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(TemporalLayer(4 if i == 0 else 16, 16, 2**i) for i in range(3)))
        self.last = nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return with_loss(self.last(self.layers(inputs.transpose(1, 2))[:, :, -1]), labels)


enter("series", "temporal_convolutions", lambda: (Temporal(), {"inputs": numbers(2, 20, 4), "labels": numbers(2, 2)}))


class NextWord(nn.Module):
    """LSTM language model with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(_VOCABULARY, _WIDTH), nn.LSTM(_WIDTH, _WIDTH, 2, batch_first=True)
        self.scores = nn.Linear(_WIDTH, _VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that turns features into logits."""
        return self.scores

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return with_loss(self.scores(self.cells(self.words(inputs))[0]), labels)


enter("encoder", "lstm_next_word", lambda: (NextWord(), _written()))


class SeriesGru(nn.Module):
    """A bidirectional GRU over a series."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(4, 16, bidirectional=True, batch_first=True), nn.Linear(32, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(inputs)[0][:, -1])


enter("series", "gru_series", lambda: (Wrapped(SeriesGru()), {"inputs": numbers(2, 20, 4), "labels": numbers(2, 2)}))


_POINTS, _EDGES = 12, 30


def _graph() -> Inputs:
    edges = torch.randint(0, _POINTS, (2, _EDGES), generator=torch.Generator().manual_seed(0))
    return {"features": numbers(_POINTS, 16), "edges": edges, "labels": torch.arange(_POINTS) % 3}


class SampledMean(nn.Module):
    """The mean of neighbours and the node itself, through layers (GraphSAGE)."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.own, self.beside = nn.Linear(one, other), nn.Linear(one, other, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        total = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.zeros(len(x), device=x.device).index_add(0, target, torch.ones(len(source), device=x.device))
        return self.own(x) + self.beside(total / count.clamp(min=1).unsqueeze(-1))


class Sage(nn.Module):
    """Two GraphSAGE layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SampledMean(16, 16), SampledMean(16, 3)

    def forward(
        self, features: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return with_loss(self.second(functional.relu(self.first(features, edges)), edges), labels)


enter("graph", "graph_sage", lambda: (Sage(), _graph()))


class NeighbourAttention(nn.Module):
    """LeakyReLU(a [W h, W h']) over neighbours, normalised (GAT, Velickovic et al. 2018), by a dense matrix of edges."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.layer = nn.Linear(one, other, bias=False)
        self.left, self.right = nn.Linear(other, 1, bias=False), nn.Linear(other, 1, bias=False)

    def forward(self, x: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        scores = functional.leaky_relu(self.left(h) + self.right(h).T, 0.2)
        return scores.masked_fill(~joined, -1e9).softmax(-1) @ h


class Gat(nn.Module):
    """Two GAT layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = NeighbourAttention(16, 16), NeighbourAttention(16, 3)

    def forward(
        self, features: torch.Tensor, joined: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return with_loss(self.second(functional.elu(self.first(features, joined)), joined), labels)


@plain("graph")
def graph_attention() -> tuple[nn.Module, Inputs]:
    """Return GAT."""
    given = _graph()
    edges = given.pop("edges")
    joined = torch.eye(_POINTS, dtype=torch.bool)
    joined[edges[0], edges[1]] = True
    return Gat(), given | {"joined": joined}


class PointNet(nn.Module):
    """Each point separately, then the maximum of each feature (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.all = PerceptronTower(32, 16, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.all(self.each(inputs).amax(-1))


enter(
    "series",
    "point_net",
    lambda: (Wrapped(PointNet()), {"inputs": numbers(4, 3, 20), "labels": torch.tensor([0, 1, 2, 3])}),
)


class RadianceField(nn.Module):
    """Sines of positions through a network to colour and density (NeRF, Mildenhall et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.density = PerceptronTower(24, 32, 32, 32), nn.Linear(32, 1)
        self.colour = PerceptronTower(35, 16, 3)

    def forward(self, positions: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        scales = 2.0 ** torch.arange(4, device=positions.device)
        angles = (positions.unsqueeze(-1) * scales).flatten(-2)
        h = self.body(torch.cat([angles.sin(), angles.cos()], -1))
        colour = self.colour(torch.cat([h, directions], -1)).sigmoid()
        return torch.cat([colour, functional.relu(self.density(h))], -1)


enter(
    "generic",
    "radiance_field",
    lambda: (RadianceField(), {"positions": numbers(8, 3), "directions": numbers(8, 3, seed=1)}),
)
