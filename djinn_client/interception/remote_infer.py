"""Remote inference of op results that only the executor can know: run the recorded program, and ask for the metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import torch

from djinn_client.interception.recording.append import append
from djinn_client.interception.recording.encode import encode_form
from djinn_client.interception.recording.recorder import SyncRequest, current
from djinn_client.interception.runtime_interface import DescribedValue, SubmissionReply
from djinn_client.interception.shape_inference.meta_infer import signature_of, written_operands, written_tensors
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, change, wrap
from djinn_client.interception.tensors.storage import Value
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.values import TensorMeta, tensor_meta
from djinn_core.torch_private import schema_of


def unknown_meta(operands: Sequence[LazyTensor]) -> TensorMeta:
    """Metadata in the place of those that only the executor knows."""
    return tensor_meta((), (), 0, torch.uint8, operands[0].remote.meta.device if operands else 0)


class RemoteInference(msgspec.Struct, frozen=True):
    """The executor's reply: the results, and the call as it can be cached."""

    results: Any
    call: Call


def ask_executor(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[LazyTensor],
    slots: tuple[Slot, ...],
    refused: bool = False,
) -> RemoteInference:
    """Record `func`, send the program and wait for the metadata of its results: one round trip.

    Raises:
        RemoteError: the op failed, with the type that eager PyTorch raises where that is a builtin.
    """
    recorder = current()
    call = unknown_call(func, args, kwargs, operands, refused)
    watcher = recorder.watcher
    if watcher is not None:
        watcher.before(call, operands)
    recorder.watcher = None  # it is told when the results are known
    try:
        out = append(call, operands, slots)
    finally:
        recorder.watcher = watcher
    placeholders = out if call.sequence else [out]
    values = [t.remote for t, same in zip(placeholders, call.inplace, strict=False) if same < 0]
    targets = written_tensors(func, args, kwargs)
    written = [operands[i] for i in targets]
    made = tuple(v.handle for v in values)
    scalar = any(str(r.type) != "Tensor" for r in schema_of(func).returns)
    asked = *made, *(w.remote.handle for w in written)
    reply = recorder.ask(SyncRequest(made if scalar else (), asked, synchronize=not asked))
    if operands and (index := operands[0].remote.meta.device):
        reply = msgspec.structs.replace(reply, described=tuple(described_on(index, d) for d in reply.described))
    for tensor, described in zip(written, reply.described[len(made) :], strict=True):
        _follow(tensor, described)
    results = _results(call, operands, values, reply)
    if watcher is not None:
        watcher.after(call, slots, operands, results if isinstance(results, tuple) else (results,))
    return RemoteInference(results, _known_call(call, reply, targets))


def described_on(index: int, described: DescribedValue) -> DescribedValue:
    """An executor's description of a value, moved to the logical device on which the client has it."""
    meta = described.meta
    moved = tensor_meta(meta.shape, meta.stride, meta.offset, meta.dtype, index, meta.conj, meta.neg)
    return msgspec.structs.replace(described, meta=moved)


def _known_call(call: Call, reply: SubmissionReply, targets: Sequence[int]) -> Call:
    """The call as the executor described it, for ops whose results follow from metadata alone.

    `targets`: positions of the operands that are described after the results, since the op may have resized them.
    """
    described = iter(reply.described)
    results = tuple(
        next(described).meta if same < 0 else meta for meta, same in zip(call.results, call.inplace, strict=True)
    )
    sizes = tuple(m.extent * m.dtype.itemsize if m is not None else 0 for m in results)
    changes = tuple(
        (i, new.meta) for i, new in zip(targets, described, strict=True) if new.meta is not call.operands[i]
    )
    return attrs.evolve(call, results=results, nbytes=sizes, refused=False, changes=changes)


def unknown_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[LazyTensor], refused: bool = False
) -> Call:
    """A call whose results are not known; those that the schema calls writes are the operands themselves."""
    returns = schema_of(func).returns
    if any(str(r.type) == "List[Tensor]" for r in returns):
        raise UnsupportedOperation(f"{func.name()} returns a list whose length only the executor knows; not supported")
    written = written_operands(func, args, kwargs)
    targets = iter(written_tensors(func, args, kwargs))
    inplace = tuple(next(targets) if r.alias_info is not None and r.alias_info.is_write else -1 for r in returns)
    form = encode_form(func, args, kwargs, [i < 0 for i in inplace], len(returns) > 1)
    metas = tuple(o.remote.meta for o in operands)
    signature = signature_of(form, metas)
    signature.layout_trusted, signature.predicts = True, False
    return Call(
        signature=signature,
        operands=metas,
        results=(unknown_meta(operands),) * len(returns),
        aliases=(-1,) * len(returns),
        inplace=inplace,
        writes=written,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        nbytes=(0,) * len(returns),
        refused=refused,
    )


def _follow(tensor: LazyTensor, described: DescribedValue) -> None:
    if described.meta is not tensor.remote.meta:
        change(tensor, described.meta)


def _results(call: Call, operands: list[LazyTensor], values: list[Value], reply: SubmissionReply) -> Any:
    made = iter(range(len(values)))
    results: list[Any] = []
    for same in call.inplace:
        if same >= 0:
            results.append(operands[same])
            continue
        index = next(made)
        results.append(_result(values[index], reply.described[index], reply, index))
    return tuple(results) if len(results) > 1 else (results[0] if results else None)


def _result(value: Value, described: DescribedValue, reply: SubmissionReply, index: int) -> Any:
    if described.scalar == "NoneType":
        return None
    if described.scalar:
        return reply.tensors[index].item()
    return wrap_described(value, described)


def wrap_described(value: Value, described: DescribedValue) -> LazyTensor:
    """A tensor for a value whose metadata the executor described."""
    value.meta = described.meta
    value.storage.nbytes = described.meta.extent * described.meta.dtype.itemsize
    return wrap(value)
