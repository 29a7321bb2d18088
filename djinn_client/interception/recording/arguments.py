"""Encode arguments of calls as forms (operands, slots and constants), and decode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_client.interception.native.generators import operand as operand_of
from djinn_client.interception.shape_inference.inference_cache import keep
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote
from djinn_client.torch_dispatch import CGenerator
from djinn_core.errors import UnsupportedOperation
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
    SessionGenerator,
    SlotArg,
)

FORMS_LIMIT = 16384  # cached forms; an evicted form that recurs is a new, equal object
_forms: dict[Form, Form] = {}
_OPERAND: Final = Operand()


def encode_form(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], new: Sequence[bool], sequence: bool, op: str | None = None
) -> Form:
    """Return the form of a call of `func`, or of Djinn's own op `op` that replaces it. Equal forms are the same object.

    `new`: for each result, True if it is a new value. `sequence`: True if the op returns several results or a list.

    Raises:
        UnsupportedOperation: an argument has a type that cannot be sent.
    """
    form = Form(
        op=func.name() if op is None else op,
        args=tuple(_encode(a, func) for a in args),
        kwargs=tuple((n, _encode(v, func)) for n, v in kwargs.items() if n != "pin_memory"),
        results=tuple(["new" if n else "none" for n in new]),
        sequence=sequence,
    )
    return keep(_forms, form, form, FORMS_LIMIT)


def _encode(a: Any, func: Any) -> Argument:
    if isinstance(a, LazyTensor):
        return _OPERAND
    if isinstance(a, torch.Tensor):
        remote = isinstance(a, LazyTensor) or a.dim() > 0
        return Operand() if remote else ScalarTensor(str(a.dtype).removeprefix("torch."))
    if a is None or isinstance(a, (bool, str)):
        return Constant(a)
    if isinstance(a, (int, float)):
        return SlotArg()
    if isinstance(a, complex):
        return ComplexSlot()
    if isinstance(a, (list, tuple)):
        return ListArg(tuple([_OPERAND if isinstance(x, LazyTensor) else _encode(x, func) for x in a]))
    return _encode_rare(a, func)


def _encode_rare(a: Any, func: Any) -> Argument:
    if isinstance(a, torch.dtype):
        return Enumerated("dtype", str(a).removeprefix("torch."))
    if isinstance(a, torch.layout):
        return Enumerated("layout", str(a).removeprefix("torch."))
    if isinstance(a, torch.memory_format):
        return Enumerated("memory_format", str(a).removeprefix("torch."))
    if isinstance(a, torch.device):
        return SelfDevice(cpu=not is_remote(a))
    if isinstance(a, CGenerator):
        return SessionGenerator() if operand_of(a) is None else Operand()
    raise UnsupportedOperation(f"{func.name()} was given a {type(a).__name__}, which cannot be sent to an executor")
