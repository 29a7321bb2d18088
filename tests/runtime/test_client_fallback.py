"""Ops that the executor cannot run: refused with advice, or, where configured, computed on the client and counted."""

from __future__ import annotations

import logging

import pytest
import torch

import djinn
from djinn_client.interception.runtime_interface import port


@torch.library.custom_op("djinn_tests::soft_sign", mutates_args=(), device_types="cpu")
def soft_sign(x: torch.Tensor) -> torch.Tensor:
    """An op of the user that no executor has."""
    return x / (1 + x.abs())


@torch.library.custom_op("djinn_tests::halve", mutates_args=("x",), device_types="cpu")
def halve(x: torch.Tensor, times: int) -> None:
    """A writing op of the user that no executor has."""
    x.mul_(0.5**times)


soft_sign.register_autograd(
    lambda ctx, gradient: gradient / (1 + ctx.saved_tensors[0].abs()) ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.fixture
def device_with_fallback(on_wrong_executor, wrong_server_file):
    """Return the device with `client_fallback`, on an executor that lacks kernels."""
    djinn.shut_down()
    djinn.configure(connection_file=wrong_server_file, client_fallback=True)
    djinn.reset_stats()
    return on_wrong_executor


def fallbacks():
    return djinn.stats()["client_fallbacks"]


def test_custom_op_without_fallback_is_refused(embedded):
    x = torch.ones(3, device=embedded)
    with pytest.raises(NotImplementedError, match=r"djinn_tests::soft_sign.*client_fallback=True"):
        soft_sign(x)
    assert port.fallback is None
    assert fallbacks() == 0


def test_missing_kernel_without_fallback_raises(on_wrong_executor):
    out = torch.ones(3, device=on_wrong_executor).lgamma()
    with pytest.raises(djinn.errors.RemoteNotImplementedError, match=r"aten::lgamma(.|\n)*client_fallback=True"):
        out.cpu()
    assert fallbacks() == 0


def test_custom_op_falls_back_to_client(device_with_fallback):
    local = torch.linspace(-2, 2, 5, requires_grad=True)
    remote = local.detach().to(device_with_fallback).requires_grad_()
    for x in (local, remote):
        (soft_sign(x) * 3).sum().backward()
    assert torch.allclose(remote.grad.cpu(), local.grad)
    assert remote.grad.device == remote.device
    assert fallbacks() == 1
    written = torch.full((2, 2), 8.0, device=device_with_fallback)
    halve(written[0], 2)
    assert written.tolist() == [[2, 2], [8, 8]]
    assert fallbacks() == 2


def test_missing_fallback_package_is_named():
    with pytest.raises(djinn.errors.ConfigurationError, match=r"pip install \./plugins/integrations"):
        djinn.configure(client_fallback=True, disable=["client_fallback"])
    assert port.fallback is None


class RecordingHandler(logging.Handler):
    """A log handler that keeps its records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def logged_fallbacks():
    """Return a function that returns the names of ops that were logged as computed by the client."""
    handler, logger = RecordingHandler(), logging.getLogger("djinn.fallback")
    logger.addHandler(handler)
    yield lambda: [record.djinn["op"] for record in handler.records]
    logger.removeHandler(handler)


def test_missing_kernel_is_learned_once(device_with_fallback, logged_fallbacks):
    x = torch.linspace(-0.5, 0.5, 4).to(device_with_fallback)
    out = [(x * n).erfinv() + 1 for n in (1, 0.5, 0.25)]
    x.erfinv_()
    local = torch.linspace(-0.5, 0.5, 4)
    for got, n in zip(out, (1, 0.5, 0.25), strict=True):
        assert torch.allclose(got.cpu(), (local * n).erfinv() + 1)
    assert torch.allclose(x.cpu(), local.erfinv())
    assert fallbacks() == 4
    assert logged_fallbacks() == ["aten::erfinv", "aten::erfinv_"], "once for each op"


def test_supported_op_stays_on_executor(device_with_fallback):
    x = torch.ones(4, 4, device=device_with_fallback)
    for _ in range(2):
        before = djinn.stats()["round_trips"]
        y = (x @ x + x).relu_().view(2, 8).exp()
    assert djinn.stats()["round_trips"] == before
    assert y.shape == (2, 8)
    assert fallbacks() == 0


def test_other_failures_are_not_computed_on_client(device_with_fallback):
    x = torch.ones(4, device=device_with_fallback)
    bad = x[torch.tensor([9], device=device_with_fallback)]
    with pytest.raises(djinn.errors.RemoteIndexError):
        bad.erfinv().cpu()
