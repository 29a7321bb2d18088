"""An instruction of a program, run here on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
)
from djinn_core.ir.operators import resolve
from djinn_core.ir.program import Call, Slot


def run_here(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Any:
    """What the op of `call` returns for these CPU operands and scalars; it runs as on an executor.

    Raises:
        Exception: whatever PyTorch raises here.
    """
    form = call.signature.form
    taken, numbers = iter(operands), iter(slots)
    positional = [_value(argument, taken, numbers) for argument in form.args]
    keywords = {name: _value(argument, taken, numbers) for name, argument in form.kwargs}
    with torch.inference_mode():
        return torch_private.kernel_of(resolve(form.op))(*positional, **keywords)


def _value(argument: Argument, operands: Iterator[torch.Tensor], slots: Iterator[Slot]) -> Any:
    if isinstance(argument, Operand):
        return next(operands)
    if isinstance(argument, SlotArg):
        return next(slots)
    if isinstance(argument, ComplexSlot):
        return complex(next(slots), next(slots))
    if isinstance(argument, ScalarTensor):
        return _scalar(getattr(torch, argument.dtype), slots)
    if isinstance(argument, ListArg):
        return [_value(item, operands, slots) for item in argument.items]
    if isinstance(argument, Enumerated):
        return getattr(torch, argument.name)
    if isinstance(argument, SelfDevice):
        return torch.device("cpu")
    return argument.value if isinstance(argument, Constant) else None


def _scalar(dtype: torch.dtype, slots: Iterator[Slot]) -> torch.Tensor:
    number = complex(next(slots), next(slots)) if dtype.is_complex else next(slots)
    return torch.tensor(number, dtype=dtype, device="cpu")
