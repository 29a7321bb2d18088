"""Ops over tensor lists: each weight of an optimizer step stays on the executor on which it lives."""

from __future__ import annotations

import copy

import pytest
import torch

import djinn
from djinn_core.ir.handles import storage_of
from djinn_pool.list_ops import ListOps

REMOTE = "remote_accelerator:0"
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, foreach=True),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01, amsgrad=True),
    "capturable": lambda weights: torch.optim.Adam(weights, 0.01, foreach=True, maximize=True),
    "fused": lambda weights: torch.optim.Adam(weights, 0.01, fused=True),
    "fused sgd": lambda weights: torch.optim.SGD(weights, torch.tensor(0.1), momentum=0.9, fused=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, 0.01, centered=True, momentum=0.9, foreach=True),
}


@pytest.fixture(scope="module")
def balanced_router(make_pool):
    """Yield the router of two executors, each with a share of the weights."""
    with make_pool("balanced") as router:
        yield router


def homes(router, tensors):
    return [router.home(storage_of(tensor.remote.handle)) for tensor in tensors]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_keeps_weights_in_place(balanced_router, name):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    ours = copy.deepcopy(theirs).to(REMOTE)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (ours, theirs)]
    seen = []
    for _ in range(4):
        batch, losses = torch.randn(6, 16), []
        for model, optimizer, given in zip((ours, theirs), optimizers, (batch.to(REMOTE), batch), strict=True):
            optimizer.zero_grad()
            loss = model(given).pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1])
        djinn.synchronize()
        seen.append(homes(balanced_router, ours.parameters()))
    assert set(seen[0]) == {0, 1}
    assert seen[1:] == seen[:-1]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.cpu(), other, atol=1e-6)


@pytest.fixture
def tensors():
    """Return three weights and their gradients, without placement."""
    with djinn.capture():
        return [torch.zeros(2, 2) for _ in range(6)]


def split(tensors, homes, record):
    """Return the ops of a program after the split, each with its tensor indexes and its scalars."""
    with djinn.capture() as captured:
        record(tensors[:3], tensors[3:])
    storages = [storage_of(tensor.remote.handle) for tensor in tensors]
    program = ListOps().split(captured.program, {storages[number]: home for number, home in homes.items()})
    numbers = {storage: number for number, storage in enumerate(storages)}
    return [
        (
            one.op.partition("_foreach_")[2].split(".")[0].rstrip("_"),
            [numbers.get(storage_of(v), -1) for v in one.inputs],
            one.slots,
        )
        for one in program.instructions()
    ]


def step(weights, gradients):
    scale = torch._foreach_norm(gradients)[0]
    torch._foreach_mul_(gradients, scale)
    torch._foreach_addcdiv_(weights, gradients, gradients, [0.25, 0.5, 0.75])


def test_list_op_is_split_by_weight_location(tensors):
    assert split(tensors, {0: 0, 1: 1, 2: 0}, step) == [
        ("norm", [3, 5], ()),
        ("norm", [4], ()),
        ("mul", [3, 5, -1], ()),
        ("mul", [4, -1], ()),
        ("addcdiv", [0, 2, 3, 5, 3, 5], (0.25, 0.75)),
        ("addcdiv", [1, 4, 4], (0.5,)),
    ]


def test_unplaced_tensors_get_one_op_each(tensors):
    assert split(tensors, {}, step)[-3:] == [
        ("addcdiv", [0, 3, 3], (0.25,)),
        ("addcdiv", [1, 4, 4], (0.5,)),
        ("addcdiv", [2, 5, 5], (0.75,)),
    ]


def test_ops_on_one_executor_stay_whole(tensors):
    assert len(split(tensors, dict.fromkeys(range(6), 1), step)) == 3


def test_dependent_positions_are_not_split(tensors):
    def multiply_by_element(weights, _):
        torch._foreach_mul_(weights, torch.select(weights[1], 0, 0)[0])

    def add_rotated(weights, _):
        torch._foreach_add_(weights, [*weights[1:], weights[0]])

    for record in (multiply_by_element, add_rotated):
        assert split(tensors, {0: 0, 1: 1, 2: 0}, record)[-1][1][:3] == [0, 1, 2]
