"""An instruction of a program, run here on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.ir.operators import resolve
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.unflatten_call import call_arguments

_HERE = torch.device("cpu")


def run_here(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Any:
    """Run the op of `call` on these CPU operands and scalars, as an executor would.

    Raises:
        Exception: whatever PyTorch raises here.
    """
    form = call.signature.form
    positional, keywords = call_arguments(form, operands, slots, _HERE)
    with torch.inference_mode():
        return torch_private.kernel_of(resolve(form.op))(*positional, **keywords)
