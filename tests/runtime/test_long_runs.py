"""A step costs what it cost at first, however many came before it: lines of Python are counted, not time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from long_forms import long_or

import djinn

DEVICE = "remote_accelerator:0"
STEPS = long_or(300, 1000)
LENGTHS = (2, 5, 3, 7, 4, 6)
EARLY = (torch.tanh, torch.sin, torch.cos)  # each makes another program of the step, which has to be planned
LATE = (torch.sigmoid, torch.exp, torch.atan)


def count_lines(run: Callable[[], None]) -> Counter[str]:
    """Return the number of Python lines that `run` executes, by function."""
    lines: Counter[str] = Counter()

    def trace(frame, event, _):
        if event == "line":
            lines[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("plans_all")
def test_python_lines_per_step_are_constant_over_time(embedded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number, shown=lambda x: x):
        optimizer.zero_grad()
        loss = shown(model(torch.ones(LENGTHS[number % len(LENGTHS)], 4, device=DEVICE))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def steps(count, functions=()):
        for number in range(count):
            step(number).item()
        for function in functions:
            step(0, function).item()

    steps(60)
    for warm in (torch.abs, torch.neg):  # the first times of anything
        step(0, warm).item()
    early = count_lines(lambda: steps(12, EARLY))
    planned = djinn.stats()["plans_made"]
    steps(STEPS)
    late = count_lines(lambda: steps(12, LATE))
    assert djinn.stats()["plans_made"] - planned >= len(LATE), "planning is not counted"
    more = (late - early).most_common(8)
    assert late.total() <= 1.05 * early.total(), f"{early.total():,} lines at first, {late.total():,} later: {more}"
