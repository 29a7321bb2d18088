"""A CNN trained on scikit-learn's handwritten digits follows the same loss curve here and on a server."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import djinn

REMOTE = "remote_accelerator:0"
STEPS, BATCH = 40, 64

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
}


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(2))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target)[order]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train(network, digits, optimizer):
    """Loss of each step, and the network's accuracy on digits that it was not trained on."""
    images, labels = digits
    losses = []
    for step in range(STEPS):
        batch = slice(step * BATCH % 1400, step * BATCH % 1400 + BATCH)
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        right = network.eval()(images[1500:]).argmax(dim=1) == labels[1500:]
    return torch.stack(losses).cpu(), right.float().mean().item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_curve_is_the_local_one(over, network, digits, name):
    mine = copy.deepcopy(network)
    expected, expected_accuracy = train(mine, digits, OPTIMIZERS[name](mine.parameters()))
    assert expected[-1] < expected[0] / 2, "it learns nothing: nothing is shown"
    theirs = copy.deepcopy(network)
    optimizer = OPTIMIZERS[name](theirs.parameters())  # built before the move: it goes on working, as for CUDA
    theirs.to(REMOTE)
    losses, accuracy = train(theirs, [data.to(REMOTE) for data in digits], optimizer)
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=1e-3)
    assert abs(accuracy - expected_accuracy) <= 0.02
    theirs.cpu()
    for mine_now, theirs_now in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs_now, mine_now, rtol=5e-2, atol=5e-3)


def test_training_needs_no_answers_from_the_server(over, network, digits):
    model = copy.deepcopy(network).to(REMOTE)
    data = [part.to(REMOTE) for part in digits]
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, data, optimizer)
    djinn.synchronize()
    djinn.reset_stats()
    train(model.train(), data, optimizer)
    assert djinn.stats()["round_trips"] == 2, "one for the losses, one for the accuracy"
