"""Append an op to this thread's program in C++.

This module also builds the calls of Djinn's own ops, which have no schema.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from djinn_client.interception.native.calls import identity_number, number_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.shape_inference.meta_infer import infer, signature_of
from djinn_client.interception.shape_inference.write_checks import check_overlap, check_resize, refuses_overlap
from djinn_client.interception.tap import taps
from djinn_client.interception.tensors.lazy_tensor import change
from djinn_core.ir.form import Argument, Form, Operand, SlotArg
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.slot_arrays import encoded_slots
from djinn_core.ir.values import TensorMeta, tensor_meta


class _Question:
    """The op about which C++ asks Python. `func` is None if C++ must not cache the call."""

    func: Any = None
    args = 0  # identity of the arguments, which the code that sets it keeps alive


question = _Question()


def append(
    call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot], *, caller_notifies: bool = False
) -> Any:
    """Append an instruction to this thread's program and return tensors for its results.

    `caller_notifies`: True if the caller calls the taps `recording` and `recorded` itself.
    """
    current()  # raises in a forked child
    for position, meta in call.changes:
        check_resize(call.op, position, meta, operands)  # type: ignore[arg-type]
        give_own_value(operands[position])
    if len(operands) > 1 and call.writes and refuses_overlap(call.op):
        for target in call.writes:
            check_overlap(call.op, target, operands)  # type: ignore[arg-type]
    for notify in () if caller_notifies else taps.recording:
        notify(call, operands)
    bits, kinds = encoded_slots(slots)
    new_handles = iter(ops.append(number_of(call), list(operands), bits, kinds))
    results = [
        operands[same] if same >= 0 else None if meta is None else next(new_handles)
        for meta, same in zip(call.results, call.inplace, strict=True)
    ]
    for index, meta in call.changes:
        change(operands[index], meta)
    for notify in () if caller_notifies else taps.recorded:
        notify(call, slots, operands, results)
    return results if call.sequence else results[0] if results else None


def give_own_value(tensor: torch.Tensor) -> None:
    """Replace the value of `tensor` by an alias if other tensors share it, because an op will change its metadata."""
    if ops.facts(tensor)[3] != 1:
        call = infer(torch.ops.aten.alias.default, (tensor,), {}, tensor.device.index or 0)
        ops.stand_for(tensor, append(call, [tensor], ()))


def remember(func: Any, args: tuple[Any, ...], call: Call | None, any_float: bool) -> None:
    """Allow the C++ fast path to replay this call, if C++ has asked about the op.

    Args:
        func: the op.
        args: its arguments. `remember` returns at once if C++ asked about other arguments.
        call: the inferred call, or None if the op returns its operand unchanged.
        any_float: True if the call holds for any values of its float arguments.
    """
    if question.args != id(args) or question.func is not func:
        return  # a handler records another op for this one
    question.func = None
    if call is None:
        ops.remember(identity_number(), False)
    elif not call.changes:
        ops.remember(number_of(call), any_float)


@functools.cache
def opaque(device: int) -> TensorMeta:
    """Return client-side metadata of a value that is not a tensor of known size: random state, generator, or event mark."""
    return tensor_meta((0,), (1,), 0, torch.uint8, device)


@functools.cache
def own_call(
    op: str,
    operands: tuple[TensorMeta, ...],
    slots: int = 0,
    *,
    has_result: bool = True,
    device: int = 0,
    writes: tuple[int, ...] = (),
) -> Call:
    """Return the call of Djinn's own op `op`, whose arguments are operands, then scalars.

    Args:
        op: name of the op.
        operands: metadata of the operands.
        slots: number of scalars.
        has_result: True if the op creates a value.
        device: logical device of that value.
        writes: positions of the operands that the op writes.
    """
    args: tuple[Argument, ...] = (*(Operand() for _ in operands), *(SlotArg() for _ in range(slots)))
    form = Form(op, args, (), ("new",) if has_result else ("none",), False)
    return unpredicted_call(form, operands, (opaque(device) if has_result else None,), writes=writes)


def unpredicted_call(
    form: Form,
    operands: tuple[TensorMeta, ...],
    results: tuple[TensorMeta | None, ...],
    *,
    inplace: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    random: bool = True,
    refused: bool = False,
) -> Call:
    """Return a call without predicted result layouts: of Djinn's own op, or of an op whose results only the executor knows.

    The parameters are fields of the call, except `form`, which is part of its signature.
    """
    signature = signature_of(form, operands)
    signature.layout_trusted = True
    none = (-1,) * len(results)
    return Call(
        signature=signature,
        operands=operands,
        results=results,
        aliases=none,
        inplace=inplace or none,
        writes=writes,
        random=random,
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        nbytes=(0,) * len(results),
        refused=refused,
    )
