"""Train a ResNet-18 with momentum; reads each loss.

python resnet18.py BATCH PIXELS
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = torch.device("remote_accelerator:0")
CLASSES, ITERATIONS = 1000, 20


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


def train(batch: int, pixels: int) -> None:
    """Train on random pictures."""
    torch.manual_seed(0)
    model = resnet18().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for iteration in range(ITERATIONS):
        pictures = torch.randn(batch, 3, pixels, pixels).to(DEVICE)
        classes = torch.randint(CLASSES, (batch,)).to(DEVICE)
        loss = F.cross_entropy(model(pictures), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {iteration + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
