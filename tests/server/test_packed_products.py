"""Packed products: used where clients allow other rounding, never stale, and given up where the trial says so."""

from __future__ import annotations

import threading

import pytest
import torch

import djinn
from djinn_core import torch_private
from djinn_server.running import arbiter
from djinn_server.running.arbiter import TrialLimits

DEVICE = "remote_accelerator:0"
RUNS = TrialLimits().compared + 4  # the first ones see the program and its weights


@pytest.fixture
def begin(monkeypatch):
    """A function that begins a session, with the numbers of products from packed weights by thread."""
    packed = list[int]()
    plain = torch_private.packed_product
    count = lambda *given: (packed.append(threading.get_ident()), plain(*given))[1]
    monkeypatch.setattr(torch_private, "packed_product", count)

    def begun(gain=float("inf"), **settings):
        monkeypatch.setattr(arbiter, "TrialLimits", lambda: TrialLimits(gain=gain))
        djinn.shut_down()
        djinn.configure(executor="inline", threads=1, **settings)
        return packed

    yield begun
    djinn.shut_down()
    djinn.configure()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def repeat(local, remote, times):
    for seed in range(times):
        x = torch.randn(1, 2 + seed, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            torch.testing.assert_close(remote(x.to(DEVICE)).cpu(), local(x))


def test_products_of_unwritten_weights_are_packed(begin):
    packed = begin(exact=False)
    local, remote = network(), network().to(DEVICE)
    repeat(local, remote, RUNS)
    before = len(packed)
    repeat(local, remote, 3)
    assert len(packed) == before + 6


def test_an_exact_session_packs_nothing(begin):
    packed = begin()
    repeat(network(), network().to(DEVICE), RUNS)
    assert not packed


def test_a_written_weight_is_not_packed_any_more(begin):
    packed = begin(exact=False)
    local, remote = network(), network().to(DEVICE)
    repeat(local, remote, RUNS)
    for model in (local, remote):
        with torch.no_grad():
            model[0].weight.mul_(-1.0)
            model[0].weight[0].zero_()
    before = len(packed)
    repeat(local, remote, 3)
    assert len(packed) == before + 3, "the other weight is packed"


def test_training_gives_the_values_of_the_ops(begin):
    begin(exact=False)
    losses = []
    for device in ("cpu", DEVICE):
        model = network().to(device)
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8, device=device)
        for _ in range(2 * RUNS):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach().cpu())
    torch.testing.assert_close(*losses)


def test_slower_products_are_not_used(begin):
    packed = begin(gain=0.0, exact=False)
    local, remote = network(), network().to(DEVICE)
    repeat(local, remote, RUNS)
    before = len(packed)
    repeat(local, remote, 3)
    assert len(packed) == before
