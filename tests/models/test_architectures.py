"""Small models of many architectures: outputs, loss, gradients and one training step are the local ones."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES
from torch.utils import _pytree as pytree

REMOTE = "remote_accelerator:0"


@pytest.fixture(params=ARCHITECTURES)
def local(request):
    torch.manual_seed(0)
    return ARCHITECTURES[request.param]()


def move(inputs):
    return {name: value.to(REMOTE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def outputs(model, inputs):
    with torch.inference_mode():
        found = model.eval()(**inputs)
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


def step(model, inputs):
    """Loss and gradients of one training step; dropout included."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    loss = model(**inputs)["loss"]
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(remote, local):
    assert remote.keys() == local.keys()
    tensors = pytree.tree_map(lambda t: t.detach().cpu(), remote)
    torch.testing.assert_close(tensors, pytree.tree_map(lambda t: t.detach(), local), rtol=1e-3, atol=2e-5)


def test_inference_and_a_training_step(over_tcp, local):
    model, inputs = local
    theirs, sent = copy.deepcopy(model).to(REMOTE), move(inputs)
    assert_same(outputs(theirs, sent), outputs(model, inputs))
    loss, gradients = step(theirs, sent)
    expected_loss, expected_gradients = step(model, inputs)
    assert loss.device == torch.device(REMOTE)
    assert_same({"loss": loss, **gradients}, {"loss": expected_loss, **expected_gradients})
    assert_same(dict(theirs.named_parameters()), dict(model.named_parameters()))
