"""Printing tensors whose elements cannot be had."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import djinn


def test_transforms_work_while_print_error_is_alive(embedded):
    """The error keeps the printing frame alive, in which PyTorch disables `torch.func`."""
    x = torch.arange(6.0).reshape(2, 3)
    wrong = torch.zeros(3, device=embedded)[torch.tensor([9], device=embedded)]
    errors = []
    for shown in (lambda: repr(wrong), lambda: torch.vmap(lambda _: repr(wrong))(x), lambda: f"{[wrong]}"):
        with pytest.raises(djinn.errors.RemoteIndexError) as caught:
            shown()
        errors.append(caught)
    for device in ("cpu", embedded):
        weight = torch.ones(4, 3, device=device)
        gradients = torch.vmap(torch.func.grad(lambda row, weight=weight: functional.linear(row, weight).sum()))(
            x.to(device)
        )
        assert gradients.tolist() == [[4] * 3] * 2
    assert len(errors) == 3
