"""Mistakes that eager PyTorch refuses are refused at the op: the same kind of error, on the user's line."""

from __future__ import annotations

import traceback
import warnings

import pytest
import torch
from mistakes import MISTAKES, make

import djinn


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch warns of before it refuses
        yield


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_raises_cpu_error_at_op(embedded, name):
    expected, got = make(name, "cpu"), make(name, embedded)
    assert expected is not None
    assert type(got) is type(expected), f"{got!r} where the CPU says {expected!r}"
    mistake = MISTAKES[name].__code__
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(got.__traceback__)]
    assert (mistake.co_filename, mistake.co_firstlineno) in lines, "the traceback shows the user's line"
    assert "Refused" not in "".join(traceback.format_exception(got)), "and not how we found out"
    djinn.synchronize()


def test_one_dimensional_batch_norm_raises(embedded):
    with pytest.raises(RuntimeError, match="must have channels"):
        torch.nn.functional.batch_norm(torch.ones(3, device=embedded), None, None, training=True)
    djinn.synchronize()


def test_tensors_are_intact_after_mistake(embedded):
    x = torch.arange(6.0, device=embedded).reshape(2, 3)
    for write in (
        lambda: x.add_(x.new_ones(4)),
        lambda: x.index_add_(0, torch.tensor([0], device=embedded), x[:1].double()),
        lambda: x.bitwise_and_(1),
        lambda: x.copy_(x.new_ones(5)),
    ):
        with pytest.raises(Exception):  # noqa: B017 - whatever it is
            write()
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_mixed_devices_raise_cuda_error(embedded):
    """The message equals CUDA's."""
    x, local = torch.ones(2, 3, device=embedded), torch.ones(2, 3)
    mixed = [
        lambda: x + local,
        lambda: local * x,
        lambda: torch.nn.functional.linear(x, local),
        lambda: torch.nn.Linear(3, 3)(x),
        lambda: torch.nn.Linear(3, 3, device=embedded)(local),
        lambda: torch.cat([x, local]),
        lambda: torch.where(x > 0, x, local),
        lambda: torch.nn.functional.cross_entropy(x, torch.tensor([0, 1])),
        lambda: torch.nn.functional.embedding(torch.tensor([0, 1]), x),
        lambda: x.add_(local),
        lambda: torch.add(local, local, out=x),
    ]
    for mix in mixed:
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*cpu"):
            mix()
    local[0] = x[0]
    assert (x + torch.tensor(2.0)).sum().item() == 18, "a number in a CPU tensor is a number"
    assert x[torch.tensor([1])].shape == (1, 3)
