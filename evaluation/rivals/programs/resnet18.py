"""Train a ResNet-18 and read each loss. The batch is resident, or uploaded for each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evaluation.rivals.counting import Device, Phase

CLASSES, STEPS, WARM_STEPS = 1000, 10, 2


class BasicBlock(nn.Module):
    """Two convolutions with a residual connection. The shortcut is a projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.shortcut(x), inplace=True)


def resnet18() -> nn.Sequential:
    """Build ResNet-18 (He et al. 2015, table 1) with 11.7 million parameters."""
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stages = [
        BasicBlock(*shape)
        for shape in ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))
    ]  # fmt: skip
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1), *stages, *head)


def run(device: Device, phase: Phase, batch: int, pixels: int) -> None:
    """Train on a batch that stays on the device, then on new images in each step, in two phases."""
    model = resnet18().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(pictures: Tensor, classes: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pictures), classes)
        loss.backward()
        optimizer.step()
        loss.item()

    def batch_on_device() -> tuple[Tensor, Tensor]:
        pictures = torch.randn(batch, 3, pixels, pixels)
        return pictures.to(device), torch.randint(CLASSES, (batch,)).to(device)

    references = batch_on_device()
    for _ in range(WARM_STEPS):
        step(*references)
    with phase("step, batch on the device", STEPS):
        for _ in range(STEPS):
            step(*references)
    for _ in range(WARM_STEPS):
        step(*batch_on_device())
    with phase("step, new pictures", STEPS):
        for _ in range(STEPS):
            step(*batch_on_device())
