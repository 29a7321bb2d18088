"""Every optimizer of PyTorch takes its parameters in lists, and gives the bits of the same optimizer here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import djinn

DEVICE = "remote_accelerator:0"
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "maximize": True}),
    "nadam": ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    "adamax": ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    "adadelta": ("Adadelta", {"lr": 0.5, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "asgd": ("ASGD", {"lr": 0.05, "weight_decay": 0.1, "t0": 2}),
    "rprop": ("Rprop", {"lr": 0.05}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
    "muon": ("Muon", {"lr": 0.01}),
}
# Here, too, these give other bits by lists than one by one; on the device they give those by lists.
OTHER_BITS_BY_LISTS = {"nadam", "radam", "asgd"}


def train(name: str, device: str, **how: bool) -> list[torch.Tensor]:
    """Return parameters and state after six steps with fixed gradients."""
    kind, settings = OPTIMIZERS[name]
    numbers = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (16, 3), (4, 4)] if kind == "Muon" else [(7, 5), (5,), (16, 3, 2), (1,), (33,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=numbers).to(device)) for shape in shapes]
    optimizer = getattr(torch.optim, kind)(parameters, **settings, **how)
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=numbers).to(device)
        optimizer.step()
    state = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [tensor.detach().cpu() for tensor in (*parameters, *state)]


def assert_same_bits(there: list[torch.Tensor], here: list[torch.Tensor]) -> None:
    """Assert that the tensors are pairwise equal."""
    assert [torch.equal(a, b) for a, b in zip(there, here, strict=True)] == [True] * len(here)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_bits_equal_local(embedded, name):
    chooses = "foreach" in inspect.signature(getattr(torch.optim, OPTIMIZERS[name][0])).parameters
    here = train(name, "cpu", foreach=True) if name in OTHER_BITS_BY_LISTS else train(name, "cpu")
    assert_same_bits(train(name, DEVICE), here)
    if chooses:
        assert_same_bits(train(name, DEVICE, foreach=False), train(name, "cpu", foreach=False))


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_fused_step_needs_no_round_trip(embedded, name, rate):
    made = {device: torch.nn.Parameter(torch.arange(4.0).to(device)) for device in ("cpu", DEVICE)}
    optimizers = {device: getattr(torch.optim, name)([made[device]], lr=rate, fused=True) for device in made}
    djinn.synchronize()
    before = djinn.stats()["round_trips"]
    for _ in range(3):
        for device, optimizer in optimizers.items():
            made[device].grad = torch.full((4,), 2.0, device=device)
            optimizer.step()
    assert djinn.stats()["round_trips"] == before
    assert torch.equal(made[DEVICE].detach().cpu(), made["cpu"])


def test_step_op_count_is_independent_of_parameters(embedded):
    def ops(count: int) -> int:
        parameters = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters)
        for _ in range(4):
            djinn.synchronize()
            before = djinn.stats()["instructions_sent"]
            optimizer.step()
            djinn.synchronize()
        return djinn.stats()["instructions_sent"] - before

    assert ops(3) == ops(30) < 20


def test_changing_bias_corrections_reuse_calls(embedded, monkeypatch):
    from djinn_client.interception import dispatch

    parameters = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(12)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(3):
        optimizer.step()
    unknown = []
    real = dispatch._record_unknown
    monkeypatch.setattr(dispatch, "_record_unknown", lambda *given: unknown.append(given[0]) or real(*given))
    optimizer.step()
    assert not unknown


def test_gradient_clipping_uses_foreach_ops(embedded):
    parameters = [torch.nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(20)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((3,), float(number), device=DEVICE)
    djinn.synchronize()
    before = djinn.stats()["instructions_sent"]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    djinn.synchronize()
    assert djinn.stats()["instructions_sent"] - before < 20
    expected = torch.stack([torch.full((3,), float(number)) for number in range(20)]).norm()
    assert norm.item() == pytest.approx(expected.item())
