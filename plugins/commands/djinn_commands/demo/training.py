"""A small convolutional network trained on scikit-learn's handwritten digits."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional

from djinn_commands.demo.task import Advance, Verdict, difference_text

EPOCHS = 6
BATCH = 64
HELD_OUT = 360
SEED = 7
# Another summation order changes the last bits, and training amplifies the difference.
LOSS_TOLERANCE = 1e-2
ACCURACY_TOLERANCE = 0.01


@attrs.frozen
class TrainingResult:
    """Result of a training run: the mean loss of each epoch, and the accuracy on held-out digits, from 0 to 1."""

    losses: tuple[float, ...]
    accuracy: float


class DigitTraining:
    """The task that trains with Adam. The data are uploaded once, and one number is fetched per epoch."""

    name = "training"
    title = "CNN on digits"

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target, dtype=torch.int64)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        self._images, self._labels = images[order], labels[order]
        torch.manual_seed(SEED)
        self._origin = _network()
        self._model: nn.Module = self._origin
        self._data: tuple[torch.Tensor, torch.Tensor] = (self._images, self._labels)

    def move(self, device: str) -> None:
        """Move a copy of the untrained network and all digits to `device`."""
        self._model = copy.deepcopy(self._origin).to(device)
        self._data = (self._images.to(device), self._labels.to(device))

    def run(self, device: str, advance: Advance) -> TrainingResult:
        """Train a copy of the untrained network, then classify the held-out digits."""
        del device
        model = copy.deepcopy(self._model)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        shuffle = torch.Generator().manual_seed(SEED)
        losses = []
        for epoch in range(EPOCHS):
            losses.append(self._epoch(model, optimizer, shuffle))
            advance(epoch + 1, EPOCHS)
        return TrainingResult(tuple(losses), self._accuracy(model))

    def _epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, shuffle: torch.Generator) -> float:
        images, labels = (data[HELD_OUT:] for data in self._data)
        model.train()
        total: Any = 0.0
        batches = torch.randperm(len(labels), generator=shuffle).to(labels.device).split(BATCH)
        for batch in batches:
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
        return float(total) / len(batches)

    @torch.no_grad()
    def _accuracy(self, model: nn.Module) -> float:
        images, labels = (data[:HELD_OUT] for data in self._data)
        model.eval()
        right: torch.Tensor = model(images).argmax(dim=1) == labels
        return right.float().mean().item()

    def compare(self, local: TrainingResult, remote: TrainingResult) -> Verdict:
        """Compare loss curve and accuracy. They count as equal within the tolerances."""
        worst = max(abs(a - b) for a, b in zip(local.losses, remote.losses, strict=True))
        close = worst <= LOSS_TOLERANCE and abs(local.accuracy - remote.accuracy) <= ACCURACY_TOLERANCE
        return Verdict(close, difference_text(worst))

    def highlights(self, remote: TrainingResult) -> list[str]:
        """Return accuracy and loss curve."""
        curve = " ".join(f"{loss:.3f}" for loss in remote.losses)
        return [f"{remote.accuracy:.1%} of {HELD_OUT} held-out digits read right", f"loss by epoch: {curve}"]


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
