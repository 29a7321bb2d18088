"""Hand-written torch networks: perceptrons, convolutions, recurrences and `nn.Transformer`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evaluation.semantics.plain_models import PLAIN, PerceptronTower, enter, plain
from evaluation.zoo.building import Inputs, numbers, words

__all__ = ["PLAIN"]

WORDS = 640


class WrappedModule(nn.Module):
    """A network with a loss: cross entropy over the last dimension, or mean squared error for float labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.network(inputs)
        return with_loss(logits, labels)


def with_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the logits, with the loss if labels are given."""
    output = {"logits": logits}
    if labels is not None:
        whole = not labels.is_floating_point()
        flat = logits.flatten(0, -2)
        output["loss"] = (
            functional.cross_entropy(flat, labels.flatten()) if whole else functional.mse_loss(logits, labels)
        )
    return output


enter(
    "generic",
    "perceptron",
    lambda: (
        WrappedModule(PerceptronTower(20, 32, 32, 5)),
        {"inputs": numbers(4, 20), "labels": torch.tensor([0, 1, 2, 3])},
    ),
)


class ResidualPerceptron(nn.Module):
    """Residual networks with norms (tabular ResNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.towers = nn.ModuleList(PerceptronTower(32, 64, 32) for _ in range(3))
        self.last = nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = self.first(inputs)
        for norm, tower in zip(self.norms, self.towers, strict=True):
            state = state + tower(norm(state))
        return self.last(state)


enter(
    "generic",
    "residual_perceptron",
    lambda: (WrappedModule(ResidualPerceptron()), {"inputs": numbers(4, 20), "labels": torch.tensor([0, 1, 2, 3])}),
)


@plain("generic")
def autoencoder() -> tuple[nn.Module, Inputs]:
    """Return an autoencoder of numbers."""
    network = nn.Sequential(PerceptronTower(20, 16, 4), PerceptronTower(4, 16, 20))
    return WrappedModule(network), {"inputs": numbers(4, 20), "labels": numbers(4, 20)}


@plain("vision")
def convolutions() -> tuple[nn.Module, Inputs]:
    """Return LeNet."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        PerceptronTower(400, 32, 5),
    )  # fmt: skip
    return WrappedModule(network), {"inputs": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


@plain("vision")
def vgg() -> tuple[nn.Module, Inputs]:
    """Return consecutive convolutions with batch norms."""
    layers: list[nn.Module] = []
    for one, other in ((3, 8), (8, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if other == 16 or one == 8 else []
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return WrappedModule(network), {"inputs": numbers(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


class Segmenting(nn.Module):
    """U-Net: down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_twice(3, 8), _twice(8, 16), _twice(16, 32)])
        self.decoder = Rising()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = [self.down[0](inputs)]
        for layer in self.down[1:]:
            features.append(layer(functional.max_pool2d(features[-1], 2)))
        return self.decoder(features).permute(0, 2, 3, 1)


class Rising(nn.Module):
    """The decoder of the U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([_twice(32, 16), _twice(16, 8)])
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, seen: list[torch.Tensor]) -> torch.Tensor:
        *before, state = seen
        for rise, layer, other in zip(self.rise, self.up, reversed(before), strict=True):
            state = layer(torch.cat([rise(state), other], dim=1))
        return self.last(state)


def _twice(one: int, other: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(),
        nn.Conv2d(other, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(),
    )  # fmt: skip


enter(
    "vision",
    "segmenting_unet",
    lambda: (
        WrappedModule(Segmenting()),
        {"inputs": numbers(2, 3, 16, 16), "labels": torch.arange(512).view(2, 16, 16) % 4},
    ),
)


@plain("audio")
def sound_convolutions() -> tuple[nn.Module, Inputs]:
    """Return M5: audio to words."""
    layers: list[nn.Module] = []
    for one, other, size, stride in ((1, 8, 80, 4), (8, 8, 3, 1), (8, 16, 3, 1)):
        layers += [nn.Conv1d(one, other, size, stride), nn.BatchNorm1d(other), nn.ReLU(), nn.MaxPool1d(4)]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 5))
    return WrappedModule(network), {"inputs": numbers(2, 1, 1600), "labels": torch.tensor([1, 2])}


class Tagger(nn.Module):
    """Network that classifies every word."""

    def __init__(self, layers: nn.Module, width: int, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = layers
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        states = self.layers(self.embedding(inputs))
        return with_loss(self.head(states[0] if isinstance(states, tuple) else states), labels)


def _tagged() -> Inputs:
    return {"inputs": words(), "labels": words(1) % 5}


enter("generic", "gru_tagger", lambda: (Tagger(nn.GRU(32, 24, batch_first=True), 24), _tagged()))
enter("generic", "lstm_tagger", lambda: (Tagger(nn.LSTM(32, 24, num_layers=2, batch_first=True), 24), _tagged()))
enter("generic", "elman_tagger", lambda: (Tagger(nn.RNN(32, 24, batch_first=True), 24), _tagged()))


class Forecasting(nn.Module):
    """LSTM that forecasts a series."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(3, 24, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs)[0][:, -1])


enter(
    "generic",
    "lstm_forecast",
    lambda: (WrappedModule(Forecasting()), {"inputs": numbers(2, 12, 3), "labels": numbers(2, 3, seed=1)}),
)


@plain("encoder")
def torch_encoder() -> tuple[nn.Module, Inputs]:
    """Return `nn.TransformerEncoder` over words."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return Tagger(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 32), _tagged()


class Translating(nn.Module):
    """`nn.Transformer` with text on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 32), nn.Embedding(WORDS, 32)
        self.transformer = nn.Transformer(32, 4, 1, 2, 64, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(
        self, inputs: torch.Tensor, decoder_input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1], device=inputs.device)
        states = self.transformer(self.source(inputs), self.target(decoder_input_ids), tgt_mask=mask)
        return with_loss(self.head(states), labels)


enter(
    "encoder-decoder",
    "torch_transformer",
    lambda: (Translating(), {"inputs": words(), "decoder_input_ids": words(1), "labels": words(1)}),
)


class PictureAutoencoder(nn.Module):
    """VAE: images to a distribution of latents, and a sample back to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16)
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 256), nn.ReLU(), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())


enter(
    "autoencoder",
    "picture_autoencoder",
    lambda: (
        WrappedModule(PictureAutoencoder()),
        {"inputs": numbers(2, 3, 16, 16), "labels": numbers(2, 3, 16, 16, seed=1)},
    ),
)


@plain("autoencoder")
def convolutional_autoencoder() -> tuple[nn.Module, Inputs]:
    """Return a convolutional image autoencoder."""
    network = nn.Sequential()
    network.add_module("encoder", nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 4, 3, 2, 1)))
    up = (nn.Upsample(scale_factor=2), nn.Conv2d(4, 8, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2))
    network.add_module("decoder", nn.Sequential(*up, nn.Conv2d(8, 3, 3, 1, 1)))
    return WrappedModule(network), {"inputs": numbers(2, 3, 16, 16), "labels": numbers(2, 3, 16, 16, seed=1)}


class Comparing(nn.Module):
    """Siamese network: the distance of two images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, 8),
        )  # fmt: skip

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": functional.pairwise_distance(self.network(one), self.network(other))}


enter(
    "vision", "siamese", lambda: (Comparing(), {"one": numbers(2, 3, 32, 32), "other": numbers(2, 3, 32, 32, seed=1)})
)


class Hearing(nn.Module):
    """Spectrograms through convolutions and a GRU to letters (DeepSpeech)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(16, 24, 5, 2), nn.BatchNorm1d(24), nn.ReLU())
        self.layers = nn.GRU(24, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 30)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.convolutions(inputs).transpose(1, 2))[0])


enter(
    "audio",
    "speech_recurrence",
    lambda: (WrappedModule(Hearing()), {"inputs": numbers(2, 16, 40), "labels": numbers(2, 18, 30, seed=1)}),
)


class Describing(nn.Module):
    """An image through convolutions and a question through an LSTM to an answer (VQA)."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.LSTM(32, 16, batch_first=True)
        self.answer = PerceptronTower(32, 32, 5)

    def forward(
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        options = self.layers(self.embedding(input_ids))[0][:, -1]
        return with_loss(self.answer(torch.cat([self.vision_encoder(pixel_values), options], dim=1)), labels)


enter(
    "multimodal",
    "visual_question",
    lambda: (
        Describing(),
        {"pixel_values": numbers(2, 3, 32, 32), "input_ids": words(), "labels": torch.tensor([1, 2])},
    ),
)
