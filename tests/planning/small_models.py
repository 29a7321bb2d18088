"""Small models with layers that repeat."""

from __future__ import annotations

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, function: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function or nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x))


class Tower(nn.Module):
    """A model with a list of layers between two linear layers. The list itself is never called."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
