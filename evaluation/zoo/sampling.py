"""Samples of all random functions. As a script, this module prints a hash of the samples of one seed on a server."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn
from torch.nn import functional

SEED = 11


def draw(device: str) -> dict[str, torch.Tensor]:
    """Return samples of one seed on `device`, drawn in a fixed order, as CPU tensors."""
    torch.manual_seed(SEED)
    weights = torch.arange(1.0, 9.0, device=device)
    results = {
        "rand": torch.rand(5, device=device),
        "randn": torch.randn(3, 4, device=device),
        "randint": torch.randint(100, (6,), device=device),
        "randperm": torch.randperm(10, device=device),
        "normal": torch.normal(weights, 2.0),
        "bernoulli": torch.bernoulli(weights / 10),
        "multinomial": torch.multinomial(weights, 4),
        "with replacement": torch.multinomial(weights, 20, replacement=True),
        "exponential": torch.empty(4, device=device).exponential_(),
        "uniform": torch.empty(4, device=device).uniform_(-1, 1),
        "poisson": torch.poisson(weights),
        "like": torch.randn_like(weights),
        "dropout": functional.dropout(weights, 0.5),
        "initialised": nn.init.trunc_normal_(torch.empty(4, 4, device=device)),
        "gumbel": functional.gumbel_softmax(weights, hard=True),
        "categorical": torch.distributions.Categorical(logits=weights).sample((5,)),
    }
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def train_with_dropout(device: str) -> dict[str, torch.Tensor]:
    """Return a network after four training steps with dropout, as CPU tensors."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(SEED)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 8, device=device)).square().mean().backward()
        optimizer.step()
    return {name: parameter.cpu() for name, parameter in model.state_dict().items()}


def fingerprint(found: dict[str, torch.Tensor]) -> str:
    """Return a hash of all bits."""
    digest = hashlib.sha256()
    for name, tensor in found.items():
        digest.update(name.encode())
        digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


if __name__ == "__main__":
    import djinn

    djinn.configure(servers=[sys.argv[1]], token=sys.argv[2], disable=("local",))
    print(fingerprint(draw("remote_accelerator:0")))
