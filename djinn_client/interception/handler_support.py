"""Device functions that plugins with an `OpHandler` use: record, ask, fetch, upload, and look up indexes."""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME, Handler
from djinn_client.interception.device.indexes import existing_index, index_of
from djinn_client.interception.dispatch import record, slots_of
from djinn_client.interception.recording.append import append, unpredicted_call
from djinn_client.interception.recording.arguments import encode_form
from djinn_client.interception.recording.recorder import SyncRequest, current
from djinn_client.interception.remote_infer import ask_executor, described_on, unknown_meta, wrap_described
from djinn_client.interception.shape_inference.meta_infer import written_operands
from djinn_client.interception.sync import copy, fetch
from djinn_client.interception.tap import Cause, waiting_for
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_client.interception.tensors.upload import upload_copy

__all__ = [
    "DEVICE_NAME",
    "Handler",
    "LazyTensor",
    "ask_call",
    "ask_executor",
    "copy",
    "existing_index",
    "fetch",
    "index_of",
    "is_remote",
    "logical_device",
    "record",
    "upload_copy",
    "written_operands",
]


def ask_call(
    op: str, func: Any, args: list[Any], kwargs: dict[str, Any], operands: list[LazyTensor], count: int, step: int
) -> tuple[tuple[torch.Tensor, ...], list[LazyTensor]]:
    """Record `func` as Djinn's own instruction `op`, wait, and return its fetched results and all its results.

    Args:
        op: name of the instruction. Its first argument is the name of `func`.
        func: the op of the program.
        args: arguments of `func`.
        kwargs: keyword arguments of `func`.
        operands: the remote tensors among the arguments, in order.
        count: number of results.
        step: distance of fetched results: results 0, `step`, `2 * step` and so on are fetched.
    """
    form = encode_form(func, (func.name(), *args), kwargs, (True,) * count, sequence=True, op=op)
    metas = tuple(o.remote.meta for o in operands)
    call = unpredicted_call(form, metas, (unknown_meta(operands),) * count)
    call.signature.predicts = False
    values = [tensor.remote for tensor in append(call, operands, slots_of(args, kwargs))]
    handles = tuple(value.handle for value in values)
    with waiting_for(Cause.SHAPE):
        reply = current().ask(SyncRequest(describe=handles, fetch=handles[::step]))
    device = metas[0].device
    descriptions = [described_on(device, d) for d in reply.described] if device else reply.described
    return reply.tensors, [wrap_described(*pair) for pair in zip(values, descriptions, strict=True)]
