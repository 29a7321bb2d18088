"""Responses to submissions: serialization of the requested values."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.devices import DeviceRuntime
from djinn_core.torch_private import inference_mode
from djinn_core.wire import limits
from djinn_core.wire.frame_order import COPIED_AT_ONCE
from djinn_core.wire.frames import Buffer
from djinn_core.wire.limits import BUFFERS, DIMENSIONS
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import TensorHeader, ValueDescription
from djinn_core.wire.tensors import dtype_name, tensor_to_wire
from djinn_server.running.run_request import RunRequest
from djinn_server.running.values import Poison, ValueTable, no_such_value
from djinn_server.session_metrics import SessionCounters


def collect(
    work: RunRequest, values: ValueTable, runtime: DeviceRuntime, limit: int, counts: SessionCounters
) -> tuple[list[TensorHeader | Failure], list[Buffer], list[ValueDescription | Failure]]:
    """Collect the values that `work` requests, at most `limit` bytes: headers, bytes, descriptions; or why one is missing.

    Small values are copied, as they are not worth borrowing. `counts`: of the session, to which this adds.
    """
    results: list[TensorHeader | Failure] = []
    body: list[Buffer] = []
    if not work.fetch and not work.describe:
        return results, body, []
    told: FailureTexts | None = None
    table = values.table
    with inference_mode(True):
        for position, handle in enumerate(work.fetch):
            value = table[handle] if handle in table else Poison(no_such_value(work.sequence, handle))
            result = _fetch(value, work, runtime, limit if position < BUFFERS else -1)
            if type(result) is tuple:
                header, data = result
                limit -= data.nbytes
                results.append(header)
                body.append(data if data.nbytes > COPIED_AT_ONCE else bytes(data))
            else:
                assert isinstance(result, Failure)
                told = told or FailureTexts()
                results.append(told.fitting(result))
                counts.poisoned_results += 1
    if not work.describe:
        return results, body, []
    told = told or FailureTexts()
    counts.described_values += len(work.describe)
    described = [
        _describe(table[handle] if handle in table else Poison(no_such_value(work.sequence, handle)), work)
        for handle in work.describe
    ]
    return results, body, [told.fitting(one) if isinstance(one, Failure) else one for one in described]


class FailureTexts:
    """Failures that one answer reports: beyond a limit only the beginnings of messages, so that the answer can be sent."""

    def __init__(self) -> None:
        self._characters = 0

    def fitting(self, failure: Failure) -> Failure:
        """The failure, with as much of its message as there is room for."""
        self._characters += len(failure.message)
        if self._characters <= limits.FAILURE_TEXTS:
            return failure
        return msgspec.structs.replace(failure, message=failure.message[: limits.FAILURE_BEGINNING])


def _fetch(
    value: Any, work: RunRequest, runtime: DeviceRuntime, room: int
) -> Failure | tuple[TensorHeader, memoryview]:
    tensor = value
    if type(value) is not torch.Tensor:
        if isinstance(value, Poison):
            return value.failure
        if not isinstance(value, torch.Tensor | bool | int | float | complex | None):
            return Failure(work.sequence, -1, "fetch", "TypeError", f"a {type(value).__name__} cannot be fetched")
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(0 if value is None else value)
    if room < 0:
        reason = f"{BUFFERS:,} tensors come back at a time; fetch the others afterwards"
        return Failure(work.sequence, -1, "fetch", "RuntimeError", reason)
    if tensor.ndim > DIMENSIONS:
        return _too_many_dimensions(tensor, work)
    if tensor.nbytes > room and tensor.untyped_storage().nbytes() > room:  # expanded ones take less than they have
        reason = f"{tensor.nbytes:,} bytes do not fit into one answer, which has room for {room:,}; fetch it in parts"
        return Failure(work.sequence, -1, "fetch", "RuntimeError", reason)
    try:
        return tensor_to_wire(runtime.deliver(tensor))
    except Exception as error:
        return Failure(work.sequence, -1, "fetch", type(error).__name__, str(error)[: limits.FAILURE_TEXT])


def _describe(value: Any, work: RunRequest) -> ValueDescription | Failure:
    if isinstance(value, Poison):
        return value.failure
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        reason = f"the result has layout {value.layout}: this op cannot return such a tensor on remote_accelerator"
        return Failure(work.sequence, -1, "", "UnsupportedOperation", reason)
    if not isinstance(value, torch.Tensor):
        return ValueDescription("uint8", (), (), 0, type(value).__name__)
    if value.dim() > DIMENSIONS:
        return _too_many_dimensions(value, work)
    try:
        name = dtype_name(value.dtype)
    except ProtocolError as error:
        return Failure(work.sequence, -1, "", "UnsupportedOperation", str(error))
    return ValueDescription(name, tuple(value.shape), value.stride(), int(value.storage_offset()))


def _too_many_dimensions(tensor: torch.Tensor, work: RunRequest) -> Failure:
    reason = f"the result has {tensor.dim()} dimensions; remote tensors have at most {DIMENSIONS}"
    return Failure(work.sequence, -1, "", "UnsupportedOperation", reason)
