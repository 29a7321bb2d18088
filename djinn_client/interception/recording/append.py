"""Appending one op to this thread's program in C++, and the calls of Djinn's own ops, which no schema describes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from djinn_client.interception.native.calls import nothing, number_of
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


class _Asked:
    """The op that C++ asks about, where the next call of it may be remembered."""

    func: Any = None
    args = 0  # the identity of its arguments; its setter keeps them


asked = _Asked()


def append(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot], *, untold: bool = False) -> Any:
    """Append an instruction to this thread's program and return tensors for its results. `untold`: the caller tells the taps."""
    current()  # raises in a forked child
    for changed, new in call.changes:
        check_resize(call.op, changed, new, operands)  # type: ignore[arg-type]
        own_value(operands[changed])
    if len(operands) > 1 and call.writes and refuses_overlap(call.op):
        for written in call.writes:
            check_overlap(call.op, written, operands)  # type: ignore[arg-type]
    for tell in () if untold else taps.recording:
        tell(call, operands)
    bits, kinds = encoded_slots(slots)
    made = iter(ops.append(number_of(call), list(operands), bits, kinds))
    results = [
        operands[same] if same >= 0 else None if meta is None else next(made)
        for meta, same in zip(call.results, call.inplace, strict=True)
    ]
    for index, meta in call.changes:
        change(operands[index], meta)
    for tell in () if untold else taps.recorded:
        tell(call, slots, operands, results)
    return results if call.sequence else results[0] if results else None


def own_value(tensor: torch.Tensor) -> None:
    """Give `tensor` a value of its own, before an op that changes its metadata, which others that share it keep."""
    if ops.facts(tensor)[3] != 1:
        call = infer(torch.ops.aten.alias.default, (tensor,), {}, tensor.device.index or 0)
        ops.stand_for(tensor, append(call, [tensor], ()))


def remember(func: Any, args: tuple[Any, ...], call: Call | None, any_float: bool) -> None:
    """Have C++ repeat this call of `func`, if it is the one that C++ asked about; None: it returns its operand once more."""
    if asked.args != id(args) or asked.func is not func:
        return  # a handler records something else for it
    asked.func = None
    if call is None:
        ops.remember(nothing(), False)
    elif not call.changes:
        ops.remember(number_of(call), any_float)


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
    return unpredicted_call(form, operands, (opaque(device) if makes else None,), writes=writes)


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
    """A call with results that nothing predicts, since Djinn makes it or only the executor knows them."""
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
