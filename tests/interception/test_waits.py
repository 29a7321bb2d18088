"""Round trips of usual programs: one for each reply that the program cannot go on without, and no others."""

from __future__ import annotations

import copy

import pytest
import torch

import djinn


class Inputs:
    """Inputs of the test programs."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.x = torch.randn(100).to(device) * 1  # small uploads are known here, what is calculated with them is not
        self.y = torch.randn(100).to(device)
        self.ints = (self.x * 3).long()
        self.square = torch.randn(8, 8).to(device) * 1
        self.host = torch.empty(100)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def step(self, clip=False):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(self.square), self.ints[:8].clamp(0, 1))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        return loss


ONCE = {
    "item": lambda t: t.x.sum().item(),
    "float": lambda t: float(t.x.sum()),
    "format": lambda t: f"{t.x.sum():.3f}",
    "tolist": lambda t: (t.x + 1).tolist(),
    "cpu": lambda t: (t.x + 1).cpu(),
    "cpu in another dtype": lambda t: (t.x + 1).to("cpu", torch.float64),
    "copy to the host": lambda t: t.host.copy_(t.x + 1),
    "numpy": lambda t: (t.x + 1).cpu().numpy(),
    "print": lambda t: str(t.x + 1),
    "print of much": lambda t: str(t.x.expand(100, 100) + 1),
    "print of integers": lambda t: str(t.ints + 1),
    "bool": lambda t: bool((t.x > 0).all()),
    "if": lambda t: 1 if t.x.max() > 0 else 0,
    "isnan": lambda t: 1 if t.x.isnan().any() else 0,
    "in": lambda t: 1.0 in t.x,
    "index of a list": lambda t: [0] * 200 and list(range(200))[(t.x > 0).sum()],
    "nonzero": lambda t: (t.x > 0).nonzero(),
    "where": lambda t: torch.where(t.x > 0),
    "mask": lambda t: t.x[t.x > 0],
    "mask of rows": lambda t: t.square[t.square[:, 0] > 0],
    "masked_select": lambda t: torch.masked_select(t.x, t.x > 0),
    "unique": lambda t: torch.unique(t.ints, return_inverse=True, return_counts=True),
    "bincount": lambda t: torch.bincount(t.ints.abs()),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.square, t.ints[:8].abs(), dim=0),
    "equal": lambda t: torch.equal(t.x, t.y),
    "allclose": lambda t: torch.allclose(t.x, t.y),
    "inv": lambda t: torch.linalg.inv(t.square),
    "topk": lambda t: t.x.topk(3).indices.tolist(),
    "multinomial": lambda t: torch.multinomial(t.x.softmax(0), 2).tolist(),
    "quantile": lambda t: t.x.quantile(0.5).item(),
    "one_hot": lambda t: torch.nn.functional.one_hot(t.ints.abs()),
    "step": lambda t: t.step().item(),
    "step with clipped gradients": lambda t: t.step(clip=True).item(),
    "ten steps": lambda t: sum(t.step().detach() for _ in range(10)).item(),
    "synchronize": lambda t: torch.accelerator.synchronize(),
}
NEVER = {
    "masked assignment": lambda t: t.x.__setitem__(t.x > 0, 1.0),
    "masked_fill": lambda t: t.x.masked_fill(t.x > 0, 1.0),
    "where of three": lambda t: torch.where(t.x > 0, t.x, t.y),
    "one_hot of known size": lambda t: torch.nn.functional.one_hot(t.ints.abs() % 9, 9),
    "histc": lambda t: torch.histc(t.x, 10),
    "iteration": lambda t: [part + 1 for part in t.x[:4]],
    "shapes": lambda t: (len(t.x), t.x.view(10, -1).shape, t.x.data_ptr() == t.y.data_ptr()),
    "svd": lambda t: torch.linalg.svd(t.square),
    "step": lambda t: t.step(),
    "deepcopy": lambda t: copy.deepcopy(t.net),
}


@pytest.fixture
def inputs(embedded):
    return Inputs(embedded)


def waits(program, inputs):
    program(inputs)  # what an op without a meta kernel returns is asked once, and remembered
    djinn.synchronize()
    djinn.reset_stats()
    program(inputs)
    return djinn.stats()["round_trips"]


@pytest.mark.parametrize("name", ONCE)
def test_read_takes_one_round_trip(inputs, name):
    assert waits(ONCE[name], inputs) == 1


@pytest.mark.parametrize("name", NEVER)
def test_program_without_read_takes_no_round_trip(inputs, name):
    assert waits(NEVER[name], inputs) == 0
