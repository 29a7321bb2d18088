"""Reconstruction of a call's arguments from its form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
)
from djinn_core.ir.program import Slot


def call_arguments(
    form: Form, operands: Sequence[torch.Tensor], slots: Sequence[Slot], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call of `form`, on `device` where it names the executor's own."""
    taken, numbers = iter(operands), iter(slots)
    positional = [_value(argument, taken, numbers, device) for argument in form.args]
    return positional, {name: _value(argument, taken, numbers, device) for name, argument in form.kwargs}


def _value(argument: Argument, operands: Iterator[torch.Tensor], slots: Iterator[Slot], device: torch.device) -> Any:
    if isinstance(argument, Operand):
        return next(operands)
    if isinstance(argument, SlotArg):
        return next(slots)
    if isinstance(argument, ComplexSlot):
        return complex(next(slots), next(slots))
    if isinstance(argument, ScalarTensor):
        return _scalar(getattr(torch, argument.dtype), slots)
    if isinstance(argument, ListArg):
        return [_value(item, operands, slots, device) for item in argument.items]
    if isinstance(argument, Enumerated):
        return getattr(torch, argument.name)
    if isinstance(argument, SelfDevice):
        return torch.device("cpu") if argument.cpu else device
    return argument.value if isinstance(argument, Constant) else None


def _scalar(dtype: torch.dtype, slots: Iterator[Slot]) -> torch.Tensor:
    number = complex(next(slots), next(slots)) if dtype.is_complex else next(slots)
    return torch.tensor(number, dtype=dtype, device="cpu")
