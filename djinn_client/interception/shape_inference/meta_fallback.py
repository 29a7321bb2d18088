"""Fallback for ops that their meta kernel refuses: the executor decides.

Some meta kernels raise other exceptions than kernels that compute, or refuse arguments that those accept. So before an op
fails on the user's line, the executor is asked: its error is raised, or its result is used. Only programs that make mistakes
pay for this.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.recording.recorder import current
from djinn_client.interception.remote_infer import ask_executor
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.dtype_support import note_taken
from djinn_client.interception.shape_inference.meta_infer import MetaKernelRefused, written_tensors
from djinn_client.interception.shape_inference.write_checks import check_overlap, refuses_overlap
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.errors import (
    DjinnError,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteTypeError,
    RemoteValueError,
)
from djinn_core.ir.program import Slot
from djinn_core.logs import get_logger

log = get_logger("djinn.interception")

# What callers tell apart; everything else is a RuntimeError to them.
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


def settle(
    refused: MetaKernelRefused,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[LazyTensor],
    slots: tuple[Slot, ...],
) -> Any:
    """Do what the executor does: raise what it raises, or have it run the op and return its results.

    Raises:
        RuntimeError: the op would write to part of what it reads.
        Exception: the executor refuses the op, too. What the op would have written is as it was.
    """
    if refused.error is not None and current().captures and not port.is_open():
        raise refused.error from None  # a capture starts no server
    written = written_tensors(func, args, kwargs)
    if refuses_overlap(func.name()):
        for target in written:
            check_overlap(func.name(), target, operands)  # kernels look at memory first
    try:
        if written:
            # What fails may have written half of its operand, so it is tried where nothing depends on it.
            tried = _with_copies(operands, written)
            ask_executor(func, args, kwargs, tried, slots, refused=True)
        if written and torch.Tag.nondeterministic_seeded in func.tags:
            results = _copied_back(operands, tried, written)  # it draws once
        else:
            results = ask_executor(func, args, kwargs, operands, slots, refused=True).results
    except RemoteError as remote:
        said = remote.words if remote.op == func.name() else ""
        if refused.error is None or (said and _kinds(remote) != _kinds(refused.error)):
            raise _as_pytorch(remote, said) from None
        if type(refused.error) in _PLAIN and said:
            raise type(refused.error)(said) from None  # meta kernels say it in other words
        raise refused.error from None
    except DjinnError as error:
        if refused.error is None:
            raise error from None
        log.debug("the executor cannot be asked about an op", op=func.name(), reason=str(error))
        raise refused.error from None
    note_taken(func, args, kwargs)
    return results


def _as_pytorch(remote: RemoteError, said: str) -> Exception:
    """The error of an op as eager PyTorch raises it, at the line of the user: what the executor adds is a note."""
    plain = _BUILTIN.get(type(remote))
    if not said or plain is None:
        return remote
    error = plain(said)
    error.add_note(str(remote))
    return error


def _with_copies(operands: list[LazyTensor], written: tuple[int, ...]) -> list[LazyTensor]:
    with torch.no_grad():  # a kernel may refuse a target because it is an operand, too
        copies = {id(operands[i]): _copy_of(operands[i]) for i in written}
    return [copies.get(id(o), o) for o in operands]


def _copy_of(tensor: LazyTensor) -> LazyTensor:
    """Return a copy with the same strides."""
    meta = tensor.remote.meta
    if not meta.numel or (meta.conj or meta.neg):
        return tensor.detach().clone()  # type: ignore[return-value]
    memory = tensor.detach().as_strided((meta.extent - meta.offset,), (1,), meta.offset).clone()
    return memory.as_strided(meta.shape, meta.stride, 0)  # type: ignore[return-value]


def _copied_back(operands: list[LazyTensor], tried: list[LazyTensor], written: tuple[int, ...]) -> Any:
    """The operands that a random op writes, with what it has drawn for their copies."""
    with torch.no_grad():
        results = [operands[i].copy_(tried[i]) for i in written]
    return results[0] if len(results) == 1 else tuple(results)


def _kinds(error: BaseException) -> list[bool]:
    return [isinstance(error, kind) for kind in _KINDS]
