"""The line that issued an op is the one that a walk up the whole stack finds, whatever is remembered on the way."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import djinn
import djinn_client
import djinn_core

DEVICE = "remote_accelerator:0"
OWN = tuple(str(Path(module.__file__).parent) for module in (torch, djinn, djinn_client, djinn_core))


class _OpsByLine(Counter):
    """Number of ops that each line of this file issued."""

    def __init__(self, captured):
        super().__init__()
        self.captured, self.after = captured, 0

    def clear(self):
        self.after = len(self.captured.program.sites)

    def __missing__(self, number):
        sites = self.captured.program.sites[self.after :]
        assert not any(code.co_filename.startswith(OWN) for code, _ in sites)
        return sum(_line_at(code, offset) == number for code, offset in sites)


def _line_at(code, offset):
    return next(caller_line for begin, end, caller_line in code.co_lines() if begin <= offset < end)


@pytest.fixture
def lines(embedded):
    """Yield the number of ops that each line of this file issued. Check each op's call site."""
    with djinn.capture() as captured:
        yield _OpsByLine(captured)


def caller_line() -> int:
    """Return the line number of the caller."""
    return sys._getframe(1).f_lineno


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def test_call_site_is_user_line_in_training_step(lines):
    model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.rand(2, 5, 8, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        last = caller_line()
    assert all(lines[last - back] for back in (1, 2, 3))


def test_call_site_distinguishes_callers_of_one_module(lines):
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(DEVICE)

    class Outer(torch.nn.Module):
        def forward(self, x):
            x = inner(x)
            self.lines = [caller_line() - 1, caller_line() + 1]
            return inner(x) + 1

    outer, x = torch.nn.Sequential(Outer()), torch.rand(3, 4, device=DEVICE)
    lines.clear()
    for _ in range(2):
        outer(x)
    first, second = (lines[number] for number in outer[0].lines)
    assert 0 < first < second == first + 2


def test_call_site_is_user_line_in_hooks_and_backward(lines):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(DEVICE)
    model[0].register_forward_hook(lambda module, given, out: out * 2)
    weight = model[1].weight
    weight.register_hook(lambda grad: grad * 3)
    hooks = caller_line()
    x = torch.rand(3, 4, device=DEVICE, requires_grad=True)
    for reentrant in (False, True):
        out = checkpoint(model, Square.apply(x), use_reentrant=reentrant)
        (gradient,) = torch.autograd.grad(Square.apply(out).sum(), x, create_graph=True) if not reentrant else (out,)
        gradient.sum().backward()
        last = caller_line()
    assert lines[hooks - 3] >= 3
    assert lines[hooks - 1] >= 2
    assert lines[last - 1] > 10


def test_call_site_is_user_line_in_nested_backward(lines):
    x = torch.rand(3, device=DEVICE, requires_grad=True)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                inside = torch.ones(3, device=DEVICE, requires_grad=True)
                (inside.exp() * 2).sum().backward()
                Nested.line = caller_line() - 1
            return grad * inside.grad

    for _ in range(2):
        Nested.apply((x * 3).exp()).sum().backward()
        last = caller_line() - 1
    assert lines[Nested.line] > 6
    assert lines[last] > 10
