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


def test_an_exact_session_packs_nothing_and_spends_nothing_on_it(begin, monkeypatch):
    asked, plain = [], arbiter.Arbiter.run
    monkeypatch.setattr(arbiter.Arbiter, "run", lambda *given, **how: (asked.append(given), plain(*given, **how))[1])
    packed = begin()
    repeat(network(), network().to(DEVICE), RUNS)
    assert packed == asked == []


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


def test_a_weight_that_its_program_writes_through_a_view_is_not_packed_in_between(begin):
    begin(exact=False)
    linear = torch.nn.functional.linear

    def program(x, weight, written):
        before = linear(x, weight), linear(x + 1, weight)
        written.add_(1.0)
        return (*before, linear(x, weight))

    for view in (None, slice(2, 5)):
        weight = torch.arange(128.0).view(16, 8) / 128
        written = torch.ones(3, 8) if view is None else weight[view]
        remote = weight.to(DEVICE)
        other = written.to(DEVICE) if view is None else remote[view]
        for _ in range(RUNS):
            x = torch.ones(4, 8)
            found = program(x.to(DEVICE), remote, other)
            torch.testing.assert_close([one.cpu() for one in found], [*program(x, weight, written)])


def test_copies_of_views_take_no_more_memory_than_the_weight(begin, monkeypatch):
    begin(exact=False)
    made, plain = list[int](), torch_private.packed_weight
    monkeypatch.setattr(torch_private, "packed_weight", lambda *given: (made.append(given[0].nbytes), plain(*given))[1])
    weight = torch.randn(32, 8)
    remote, x = weight.to(DEVICE), torch.ones(4, 8)
    for row in range(25):
        found = torch.nn.functional.linear(x.to(DEVICE), remote.narrow(0, row, 8))
        torch.testing.assert_close(found.cpu(), torch.nn.functional.linear(x, weight.narrow(0, row, 8)))
    assert sum(made) == weight.nbytes
