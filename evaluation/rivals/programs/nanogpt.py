"""Train the character model of nanoGPT: 6 layers, 6 heads, 384 wide, 10.8 million parameters; reads each fourth loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evaluation.rivals.counting import Device, Phase

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY, DROPOUT = 6, 6, 384, 256, 65, 0.2
ITERATIONS, READ_EVERY = 20, 4


class Block(nn.Module):
    """Pre-norm transformer block without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.queries_keys_values(self.norms[0](x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + self.dropout(self.mixed(heads.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class CharacterModel(nn.Module):
    """Model that predicts the next character. The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.characters.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(self.characters(ids) + positions))))


def run(device: Device, phase: Phase, batch: int, context: int) -> None:
    """Train on random characters, in one phase that includes the upload of the model."""
    text = torch.randint(VOCABULARY, (100_000,))
    model = CharacterModel()
    with phase("20 iterations"):
        train(model.to(device), text, device, batch, context)


def train(model: CharacterModel, text: Tensor, device: Device, batch: int, context: int) -> None:
    """Run 20 iterations with AdamW."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    for iteration in range(ITERATIONS):
        starts = torch.randint(len(text) - context, (batch, 1))
        sequences = text[starts + torch.arange(context + 1)]
        ids, targets = sequences[:, :-1].contiguous().to(device), sequences[:, 1:].contiguous().to(device)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iteration % READ_EVERY == READ_EVERY - 1:
            loss.item()
