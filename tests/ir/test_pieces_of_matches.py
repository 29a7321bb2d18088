"""A program that is cut into pieces: node ids in the hints of a match are those of its piece."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import djinn
from djinn_core.ir.profile import Nodes
from djinn_core.ir.rebinding import profile_of_piece

CUT = 2  # nodes before the piece
WIDTH = 8


class Scaled(nn.Module):
    """A norm that is written out."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = Gated()

    def forward(self, x):
        x = x + F.scaled_dot_product_attention(x, x, x)
        return x + self.network(x)


class Meeting(nn.Module):
    """Text and a picture, side by side."""

    def __init__(self):
        super().__init__()
        self.table, self.patches = nn.Embedding(500, WIDTH), nn.Conv2d(3, WIDTH, 8, 8)

    def forward(self, pixels):
        words = self.table(torch.ones(2, 5, dtype=torch.long, device=pixels.device)).relu()
        return torch.cat([words, self.patches(pixels).flatten(2).mT.relu()], 1).exp()


def flat(facts):
    """All the nodes in the hints of a match."""
    if isinstance(facts, Nodes):
        return list(facts)
    if isinstance(facts, dict):
        facts = facts.values()
    return [node for fact in facts for node in flat(fact)] if not isinstance(facts, int | float | str) else []


@pytest.mark.parametrize(
    ("model", "given", "pattern"),
    [
        (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (2, 3, 16, 16), "convolution"),
        (nn.Sequential(nn.ReLU(), nn.ReLU(), Scaled()), (2, 5, WIDTH), "norm"),
        (nn.Sequential(nn.ReLU(), nn.ReLU(), Gated()), (2, 5, WIDTH), "mlp"),
        (nn.Sequential(nn.ReLU(), nn.ReLU(), Block()), (1, 2, 5, WIDTH), "block"),
        (Meeting(), (2, 3, 16, 16), "fusion_point"),
    ],
)
def test_hints_name_the_nodes_of_the_piece(model, given, pattern):
    with torch.device("meta"):
        x = torch.zeros(given)
    with djinn.capture() as captured, torch.no_grad():
        result = model.eval().to("meta")(x)
    assert result.shape
    (whole,) = [m for m in captured.profile.patterns if m.pattern == pattern]
    piece = profile_of_piece(captured.profile, range(CUT, len(captured.graph.nodes)), {})
    (cut,) = [m for m in piece.patterns if m.pattern == pattern]
    assert flat(whole.hints)
    assert flat(cut.hints) == [node - CUT for node in flat(whole.hints) if node >= CUT]
