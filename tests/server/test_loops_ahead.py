"""Loops that wait for each result, on a real executor: steps that have run before they are asked for are those of local PyTorch, bit by bit."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from djinn.testing import executor_figures

WIDTH = 256
STEPS = 14
AT = 10  # the step before which something is done to the loop
WAITS = (0.02, 0.2, 2.0)  # seconds in which a step runs ahead; a busy machine needs more


def ahead_counts():
    figures = executor_figures()
    return figures["runs_ahead"], figures["runs_ahead_dropped"]


def run_until_ahead(run, ran_ahead):
    """Call `run` with growing wait times in its loop until a step ran ahead. Return the used and dropped steps."""
    for wait in WAITS:
        before = ahead_counts()
        run(wait)
        taken, dropped = (now - then for now, then in zip(ahead_counts(), before, strict=True))
        if taken >= ran_ahead:
            return taken, dropped
    pytest.fail(f"{taken} steps ran ahead, of {ran_ahead}")


def run_loop(device, disturb=None, wait=0.0):
    """Return results of a loop with a growing cache. `disturb`: changes its state once."""
    torch.manual_seed(0)
    state = SimpleNamespace(x=torch.ones(128, WIDTH).to(device), cache=torch.zeros(1, WIDTH).to(device), factor=1.5)
    state.weight, state.device = (torch.randn(WIDTH, WIDTH) * 0.1).to(device), device
    found = []
    for number in range(STEPS):
        if number == AT and disturb is not None:
            disturb(state)
        x, taken = state.x, torch.arange(number, number + 2, device=device) % WIDTH
        for _ in range(4):
            x = torch.tanh(x @ state.weight)
        state.cache = torch.cat((state.cache, x[:1]))
        kept = state.cache[None, None]  # whose op may draw random numbers, and draws none here
        attended = torch.nn.functional.scaled_dot_product_attention(x[None, None], kept, kept)[0, 0]
        state.x = x + attended * state.factor + x[:, taken].sum()
        found.append(state.x.sum().item())
        time.sleep(wait if number in {AT - 2, AT - 1} else 0.0)
    return found


def write_cache(state):
    state.weight.mul_(0.5)


def write_through_view(state):
    state.cache[2:4].zero_()


def replace_cache(state):
    state.cache = torch.full((3, WIDTH), 0.25).to(state.device)


def drop_cache(state):
    state.weight = state.weight * 2
    del state.cache
    state.cache = torch.zeros(1, WIDTH, device=state.device)


def change_number(state):
    state.factor = 0.75


def change_size(state):
    state.x = state.x[:96]


def read(state):
    assert state.weight.sum().item()


@pytest.mark.parametrize(
    "disturb", [None, write_cache, write_through_view, replace_cache, drop_cache, change_number, change_size, read]
)
def test_loop_equals_local(embedded, disturb):
    expected = run_loop("cpu", disturb)

    def run(wait):
        assert run_loop(embedded, disturb, wait) == expected

    _, dropped = run_until_ahead(run, 2)
    assert dropped <= 8, "one step at its end, and one where it was disturbed"


def test_random_numbers_equal_local(embedded):
    def draw(device, wait=0.0):
        torch.manual_seed(3)
        weight, found = (torch.randn(WIDTH, WIDTH) * 0.1).to(device), []
        x = torch.ones(64, WIDTH).to(device)
        torch.manual_seed(3)
        for number in range(STEPS):
            x = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.25) @ weight
            found.append((x @ weight).sum().item())
            time.sleep(wait if number == AT else 0.0)
        return found

    expected = draw("cpu")

    def run(wait):
        assert draw(embedded, wait) == expected

    run_until_ahead(run, 1)


def test_failure_in_run_ahead_raises_at_fetch(embedded):
    def run(wait):
        torch.manual_seed(0)
        rows, at = torch.randn(STEPS, 1 << 17).to(embedded), torch.zeros(1, dtype=torch.long).to(embedded)
        for number in range(STEPS + 2):
            row = rows[at]
            for _ in range(6):
                row = torch.tanh(row) * 0.5
            at = at + 1
            if number < STEPS:
                assert row.sum().item()
            else:
                with pytest.raises(IndexError, match="out of bounds"):
                    row.sum().item()
            time.sleep(wait if number > STEPS - 3 else 0.0)
        assert at.item() == STEPS + 2

    run_until_ahead(run, 1)
