"""Calls of Djinn's own ops, which no schema describes."""

from __future__ import annotations

import functools

import torch

from djinn_client.interception.shape_inference.meta_infer import signature_of
from djinn_core.ir.form import Argument, Form, Operand, SlotArg
from djinn_core.ir.program import Call
from djinn_core.ir.values import TensorMeta, tensor_meta


@functools.cache
def opaque(device: int) -> TensorMeta:
    """Client-side metadata of a value that is no tensor of known size: random state, a generator, a mark in time."""
    return tensor_meta((0,), (1,), 0, torch.uint8, device)


@functools.cache
def own_call(
    op: str,
    operands: tuple[TensorMeta, ...],
    slots: int = 0,
    *,
    makes: bool = True,
    device: int = 0,
    writes: tuple[int, ...] = (),
) -> Call:
    """The call of `op` with these operands and after them `slots` scalars; it makes a value of a device, or nothing."""
    args: tuple[Argument, ...] = (*(Operand() for _ in operands), *(SlotArg() for _ in range(slots)))
    form = Form(op, args, (), ("new",) if makes else ("none",), False)
    signature = signature_of(form, operands)
    signature.layout_trusted = True  # nothing was predicted
    return Call(
        signature=signature,
        operands=operands,
        results=(opaque(device) if makes else None,),
        aliases=(-1,),
        inplace=(-1,),
        writes=writes,
        random=True,
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        nbytes=(0,),
    )
