"""Remote inference of results that only the executor can know: run the recorded program, and request the metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import torch

from djinn_client.interception.recording.append import append, unpredicted_call
from djinn_client.interception.recording.arguments import encode_form
from djinn_client.interception.recording.recorder import SyncRequest, current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.meta_infer import (
    MetaKernelRefused,
    written_operands,
    written_tensors,
)
from djinn_client.interception.shape_inference.trials import note_support
from djinn_client.interception.shape_inference.write_checks import check_overlap, refuses_overlap
from djinn_client.interception.tap import Cause, taps, waiting_for
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, change, wrap
from djinn_client.interception.tensors.storage import Value
from djinn_client.sink import DescribedValue, SubmissionReply
from djinn_core.errors import (
    DjinnError,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteTypeError,
    RemoteValueError,
    UnsupportedOperation,
)
from djinn_core.ir.program import Call, Slot
from djinn_core.ir.values import TensorMeta, tensor_meta
from djinn_core.logs import get_logger
from djinn_core.torch_private import schema_of


def unknown_meta(operands: Sequence[LazyTensor]) -> TensorMeta:
    """Return a placeholder for metadata that only the executor knows."""
    return tensor_meta((), (), 0, torch.uint8, operands[0].remote.meta.device if operands else 0)


class RemoteInference(msgspec.Struct, frozen=True):
    """The executor's reply about an op.

    Attributes:
        results: tensors or numbers, as the op returns them.
        call: the call with the result metadata from the executor, which can be cached.
    """

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
    """Record `func`, send the program, and wait for the metadata of its results: one round trip.

    `refused`: True if the meta kernel refused the arguments, so that the executor checks them.

    Raises:
        RemoteError: the op failed. If eager PyTorch raises a builtin type, the error is also of that type.
    """
    recorder = current()
    call = unknown_call(func, args, kwargs, operands, refused)
    for notify in taps.recording:
        notify(call, operands)
    out = append(call, operands, slots, caller_notifies=True)  # taps are notified once the results are known
    placeholders = out if call.sequence else [out]
    values = [t.remote for t, same in zip(placeholders, call.inplace, strict=False) if same < 0]
    targets = written_tensors(func, args, kwargs)
    target_tensors = [operands[i] for i in targets]
    handles = tuple(v.handle for v in values)
    scalar = any(str(r.type) != "Tensor" for r in schema_of(func).returns)
    requested = *handles, *(operand.remote.handle for operand in target_tensors)
    with waiting_for(Cause.SHAPE):
        reply = recorder.ask(SyncRequest(handles if scalar else (), requested, synchronize=not requested))
    if operands and (index := operands[0].remote.meta.device):
        reply = msgspec.structs.replace(reply, described=tuple(described_on(index, d) for d in reply.described))
    for tensor, description in zip(target_tensors, reply.described[len(handles) :], strict=True):
        _set_meta(tensor, description)
    results = _results(call, operands, values, reply)
    for notify in taps.recorded:
        notify(call, slots, operands, results if isinstance(results, tuple) else (results,))
    return RemoteInference(results, _known_call(call, reply, targets))


def described_on(index: int, described: DescribedValue) -> DescribedValue:
    """Return an executor's description of a value, converted to the client's logical device."""
    meta = described.meta
    meta_there = tensor_meta(meta.shape, meta.stride, meta.offset, meta.dtype, index, meta.conj, meta.neg)
    return msgspec.structs.replace(described, meta=meta_there)


def _known_call(call: Call, reply: SubmissionReply, targets: Sequence[int]) -> Call:
    """Return the call with the result metadata that the executor sent, for ops whose results follow from metadata alone.

    `targets`: positions of operands that the op may have resized. Their descriptions follow the results.
    """
    descriptions = iter(reply.described)
    results = tuple(
        next(descriptions).meta if same < 0 else meta for meta, same in zip(call.results, call.inplace, strict=True)
    )
    sizes = tuple(m.extent * m.dtype.itemsize if m is not None else 0 for m in results)
    changes = tuple(
        (i, new.meta) for i, new in zip(targets, descriptions, strict=True) if new.meta is not call.operands[i]
    )
    return attrs.evolve(call, results=results, nbytes=sizes, refused=False, changes=changes)


def unknown_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[LazyTensor], refused: bool = False
) -> Call:
    """Return a call with unknown results. A result that the schema marks as written is the written operand."""
    returns = schema_of(func).returns
    if any(str(r.type) == "List[Tensor]" for r in returns):
        raise UnsupportedOperation(
            f"{func.name()} is not supported on the remote device: it returns a list whose length only the executor knows. "
            "Run it on the CPU"
        )
    write_targets = written_operands(func, args, kwargs)
    targets = iter(written_tensors(func, args, kwargs))
    inplace = tuple(next(targets) if r.alias_info is not None and r.alias_info.is_write else -1 for r in returns)
    form = encode_form(func, args, kwargs, [i < 0 for i in inplace], len(returns) > 1)
    metas = tuple(o.remote.meta for o in operands)
    unknown, random = (unknown_meta(operands),) * len(returns), torch.Tag.nondeterministic_seeded in func.tags
    call = unpredicted_call(form, metas, unknown, inplace=inplace, writes=write_targets, random=random, refused=refused)
    call.signature.predicts = False
    return call


def _set_meta(tensor: LazyTensor, described: DescribedValue) -> None:
    if described.meta is not tensor.remote.meta:
        change(tensor, described.meta)


def _results(call: Call, operands: list[LazyTensor], values: list[Value], reply: SubmissionReply) -> Any:
    numbers = iter(range(len(values)))
    results: list[Any] = []
    for same in call.inplace:
        if same >= 0:
            results.append(operands[same])
            continue
        index = next(numbers)
        results.append(_result(values[index], reply.described[index], reply, index))
    return tuple(results) if len(results) > 1 else (results[0] if results else None)


def _result(value: Value, described: DescribedValue, reply: SubmissionReply, index: int) -> Any:
    if described.scalar == "NoneType":
        return None
    if described.scalar:
        return reply.tensors[index].item()
    return wrap_described(value, described)


def wrap_described(value: Value, described: DescribedValue) -> LazyTensor:
    """Return a tensor for a value that the executor described."""
    value.meta = described.meta
    return wrap(value)


log = get_logger("djinn.interception")

# Error types that callers handle separately. All others become RuntimeError.
_KINDS = (
    NotImplementedError,
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)
_BUILTIN = {
    RemoteError: RuntimeError,
    RemoteIndexError: IndexError,
    RemoteValueError: ValueError,
    RemoteTypeError: TypeError,
    RemoteNotImplementedError: NotImplementedError,
}
_PLAIN = frozenset({RuntimeError, NotImplementedError, IndexError, ValueError, TypeError})


def run_refused(
    refusal: MetaKernelRefused,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[LazyTensor],
    slots: tuple[Slot, ...],
) -> Any:
    """Ask the executor to run an op that the meta kernel refused. Return the op's results, or raise the op's error.

    `refusal`: the error of the meta kernel. Meta kernels may refuse arguments that the executor's kernels accept.

    Raises:
        RuntimeError: the op would write to memory that it also reads.
        Exception: the executor refuses the op as well. Written operands are then unchanged.
    """
    if refusal.error is not None and current().captures and not port.is_open():
        raise refusal.error from None  # a capture starts no server
    targets = written_tensors(func, args, kwargs)
    if refuses_overlap(func.name()):
        for target in targets:
            check_overlap(func.name(), target, operands)  # kernels check memory overlap first
    try:
        if targets:
            # An op that fails may have written half of its operand, so it is copies on copies.
            result = _with_copies(operands, targets)
            ask_executor(func, args, kwargs, result, slots, refused=True)
        if targets and torch.Tag.nondeterministic_seeded in func.tags:
            results = _copied_back(operands, result, targets)  # the op draws random numbers only once
        else:
            results = ask_executor(func, args, kwargs, operands, slots, refused=True).results
    except RemoteError as remote:
        message = remote.remote_message if remote.op == func.name() else ""
        if refusal.error is None or (message and _kinds(remote) != _kinds(refusal.error)):
            raise _as_pytorch(remote, message) from None
        if type(refusal.error) in _PLAIN and message:
            raise type(refusal.error)(message) from None  # meta kernels use other words for the same error
        raise refusal.error from None
    except DjinnError as error:
        if refusal.error is None:
            raise error from None
        log.debug("the executor could not infer the results of an op", op=func.name(), reason=str(error))
        raise refusal.error from None
    note_support(func, args, kwargs)
    return results


def _as_pytorch(remote: RemoteError, message: str) -> Exception:
    """Return an op's error as eager PyTorch raises it, on the user's line.

    The message from the executor becomes a note.
    """
    plain = _BUILTIN.get(type(remote))
    if not message or plain is None:
        return remote
    error = plain(message)
    error.add_note(str(remote))
    return error


def _with_copies(operands: list[LazyTensor], written_positions: tuple[int, ...]) -> list[LazyTensor]:
    with torch.no_grad():  # a kernel may refuse a target because it is also an operand
        copies = {id(operands[i]): _copy_of(operands[i]) for i in written_positions}
    return [copies.get(id(o), o) for o in operands]


def _copy_of(tensor: LazyTensor) -> LazyTensor:
    meta = tensor.remote.meta
    if not meta.numel or (meta.conj or meta.neg):
        return tensor.detach().clone()  # type: ignore[return-value]
    memory = tensor.detach().as_strided((meta.extent - meta.offset,), (1,), meta.offset).clone()
    return memory.as_strided(meta.shape, meta.stride, 0)  # type: ignore[return-value]


def _copied_back(operands: list[LazyTensor], copies: list[LazyTensor], written_positions: tuple[int, ...]) -> Any:
    """Copy `copies`, into which a random op wrote its results, to the written operands. Return those operands."""
    with torch.no_grad():
        results = [operands[i].copy_(copies[i]) for i in written_positions]
    return results[0] if len(results) == 1 else tuple(results)


def _kinds(error: BaseException) -> list[bool]:
    return [isinstance(error, kind) for kind in _KINDS]
