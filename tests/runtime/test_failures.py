"""What fails remotely reaches the user as the right error, and takes nothing along that does not depend on it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import djinn
from djinn_core.runtime import client


@pytest.fixture
def x(embedded):
    return torch.arange(6.0, device=embedded).reshape(2, 3)


def out_of_range(device):
    return torch.tensor([7], device=device)


def test_a_failing_op_names_itself_its_shapes_and_the_users_line(x):
    bad = x[out_of_range(x.device)]  # this line
    with pytest.raises(IndexError) as caught:
        bad.sum().item()
    error = caught.value
    assert isinstance(error, djinn.RemoteIndexError)
    assert error.op == "aten::index.Tensor"
    assert "out of bounds" in str(error)
    assert "float32[2, 3], int64[1]" in str(error)
    this = test_a_failing_op_names_itself_its_shapes_and_the_users_line
    assert f"{__file__}:{this.__code__.co_firstlineno + 1} in {this.__name__}" in error.site
    assert error.site in str(error)


def test_it_poisons_only_what_depends_on_it(x):
    bad = x[out_of_range(x.device)]
    worse = bad * 2 + x[:1]
    fine = x * 2
    assert fine.tolist() == [[0, 2, 4], [6, 8, 10]]
    for _ in range(2):
        with pytest.raises(djinn.RemoteIndexError):
            worse.cpu()
    assert x.sum().item() == 15


def test_a_failing_write_poisons_its_storage_and_nothing_else(x):
    view, other = x[0], x.clone()
    x[out_of_range(x.device)] = 1.0
    later = x.t()
    for poisoned in (x, view, later):
        with pytest.raises(djinn.RemoteIndexError):
            poisoned.cpu()
    assert other.sum().item() == 15


def test_a_failing_write_to_a_view_poisons_the_tensor_that_it_views(x):
    before = x.clone()
    assert before.sum().item() == 15  # x lives on the executor from here on, and is an input of what follows
    x[:1][out_of_range(x.device)] = 1.0
    with pytest.raises(djinn.RemoteIndexError):
        x.cpu()
    assert before.sum().item() == 15


def test_a_poisoned_tensor_can_be_dropped_and_made_anew(x):
    bad = x[out_of_range(x.device)]
    with pytest.raises(djinn.RemoteIndexError):
        bad.cpu()
    before = client._state.session.figures()["values"]
    del bad
    djinn.synchronize()
    assert client._state.session.figures()["values"] < before


def test_synchronize_reports_the_first_failure_that_nobody_has_seen(x):
    djinn.synchronize()
    seen = x[out_of_range(x.device)]
    with pytest.raises(djinn.RemoteIndexError):
        seen.cpu()
    djinn.synchronize()
    kept = [x[out_of_range(x.device)], torch.linalg.cholesky(-torch.eye(2, device=x.device))]
    with pytest.raises(djinn.RemoteError, match=r"index|cholesky"):
        djinn.synchronize()
    djinn.synchronize()
    assert len(kept) == 2


def test_many_failures_neither_hang_nor_pile_up(x, monkeypatch):
    """An executor that tells of thousands of failures while the client sends would wait for it to read."""
    from djinn_core.interception.port import port

    monkeypatch.setattr(port, "checkpoint_instructions", 400)
    index = out_of_range(x.device)
    kept = [x[index] for _ in range(4000)]
    with pytest.raises(djinn.RemoteIndexError, match=f"{__file__}:"):
        kept[-1].cpu()
    session = client._state.session
    assert len(session._failures._unseen) <= 64
    assert len(session._failures._programs) <= 64
    with pytest.raises(djinn.RemoteIndexError):
        djinn.synchronize()


MISTAKES = {
    "add": lambda x: x + x.new_ones(4),
    "mm": lambda x: x @ x,
    "view": lambda x: x.t().view(-1),
    "index": lambda x: x[5],
    "dim": lambda x: x.sum(3),
    "cat": lambda x: torch.cat([x, x.new_ones(2, 2)]),
    "dtype": lambda x: x.long().mean(),
    "cast": lambda x: (x > 1).mul_(2),
    "grow": lambda x: x.add_(x.new_ones(4, 2, 3)),
    "overlap": lambda x: x[0, 1:].copy_(x[0, :-1]),
    "truth": bool,
    "number": int,
    "reshape": lambda x: x.reshape(4, 2),
    "conv": lambda x: torch.nn.functional.conv2d(x, x),
    "other": lambda x: x + torch.ones(3) if x.device.type != "cpu" else x + torch.ones(3, device="meta"),
    "history": lambda x: copy.deepcopy(x.requires_grad_() * 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_pytorch_refuses_is_refused_at_the_op(x, mistake):
    """With the same kind of error, without a message, and without harm to the operands."""
    local = x.cpu()
    with pytest.raises(Exception) as expected:  # whatever it is
        MISTAKES[mistake](local)
    djinn.reset_stats()
    with pytest.raises(type(expected.value)):
        MISTAKES[mistake](x)
    assert djinn.stats()["round_trips"] == 0
    assert x.tolist() == local.tolist()


def test_errors_inside_backward_arrive_as_themselves(x):
    class Mine(Exception):
        pass

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            raise Mine("in backward")

    class Mismatched(Raises):
        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient.new_ones(5)

    class Asks(Raises):
        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient[out_of_range(gradient.device)].sum().item()

    def hook(_):
        raise Mine("in a hook")

    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    with pytest.raises(Mine, match="in backward"):
        Raises.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match=r"broadcast|size"):
        Mismatched.apply(weight).sum().backward()
    with pytest.raises(djinn.RemoteIndexError):
        Asks.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss = (weight * weight).sum()
        loss.backward()
        loss.backward()
    result = weight * 2
    result.register_hook(hook)
    with pytest.raises(Mine, match="in a hook"):
        result.sum().backward()
    weight.grad = None
    (weight * x).sum().backward()
    assert weight.grad.tolist() == x.tolist()


def test_an_interrupt_inside_backward_is_an_interrupt(x, monkeypatch):
    from djinn_core.interception import dispatch

    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    loss = (weight * x).sum()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


def test_the_errors_of_one_backward_are_not_those_of_the_next(x):
    class Mismatched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            with contextlib.suppress(Exception):
                gradient + gradient.new_ones(5)
            return gradient * 2

    weight = torch.ones(2, 3, device=x.device, requires_grad=True)
    with contextlib.suppress(RuntimeError):
        Mismatched.apply(weight).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss = (weight * weight).sum()
        loss.backward()
        loss.backward()
