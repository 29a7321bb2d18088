"""Appending one op to this thread's program in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_client.interception.native.calls import encoded_slots, nothing, number_of
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.shape_inference.meta_infer import infer
from djinn_client.interception.shape_inference.write_checks import check_overlap, check_resize, refuses_overlap
from djinn_client.interception.tensors.lazy_tensor import change
from djinn_core.ir.program import Call, Slot


class _Asked:
    """The op that C++ asks about, where the next call of it may be remembered."""

    func: Any = None
    args = 0  # the identity of its arguments; its setter keeps them


asked = _Asked()


def append(call: Call, operands: Sequence[torch.Tensor], slots: Sequence[Slot]) -> Any:
    """Append an instruction to this thread's program and return tensors for its results."""
    recorder = current()
    for changed, new in call.changes:
        check_resize(call.op, changed, new, operands)  # type: ignore[arg-type]
        own_value(operands[changed])
    if len(operands) > 1 and call.writes and refuses_overlap(call.op):
        for written in call.writes:
            check_overlap(call.op, written, operands)  # type: ignore[arg-type]
    watcher = recorder.watcher
    if watcher is not None:
        watcher.before(call, operands)  # type: ignore[arg-type]
    bits, kinds = encoded_slots(slots)
    made = iter(ops.append(number_of(call), list(operands), bits, kinds))
    results = [
        operands[same] if same >= 0 else None if meta is None else next(made)
        for meta, same in zip(call.results, call.inplace, strict=True)
    ]
    for index, meta in call.changes:
        change(operands[index], meta)
    if watcher is not None:
        watcher.after(call, slots, operands, results)  # type: ignore[arg-type]
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
