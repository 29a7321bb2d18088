"""Reply to a submission: copy and serialize the values that the client fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec
import torch

from djinn_core.errors import ProtocolError
from djinn_core.torch_private import inference_mode
from djinn_core.wire import limits
from djinn_core.wire.frame_order import COPIED_AT_ONCE
from djinn_core.wire.frames import Buffer
from djinn_core.wire.limits import BUFFERS, DIMENSIONS
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import TensorHeader, ValueDescription
from djinn_core.wire.tensors import dtype_name, tensor_to_wire
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.run_request import RunRequest
from djinn_server.running.values import Poison, ValueTable, no_such_value
from djinn_server.session_metrics import SessionCounters


@attrs.define(eq=False)
class Responses:
    """Copies to the host of the values that a submission fetches. `start` needs the device, `finish` does not.

    Attributes:
        results: headers of the values, or their failures. They are complete after `finish`.
        body: bytes of the values, without those that failed.
        descriptions: descriptions of values whose metadata the client requested, or their failures.
    """

    results: list[TensorHeader | Failure] = attrs.field(factory=list)
    body: list[Buffer] = attrs.field(factory=list)
    descriptions: list[ValueDescription | Failure] = attrs.field(factory=list)
    _work: RunRequest | None = None
    _counts: SessionCounters | None = None
    _deliveries: list[Failure | Callable[[], torch.Tensor]] = attrs.field(factory=list)
    _limit: int = 0

    @classmethod
    def start(
        cls, work: RunRequest, values: ValueTable, runtime: DeviceRuntime, limit: int, counts: SessionCounters
    ) -> Responses:
        """Start copies of the values in `work.fetch` to the host, and describe the values in `work.describe`.

        Args:
            work: the submission.
            values: the session's values.
            runtime: the device.
            limit: maximum size of a reply in bytes.
            counts: counters of the session.
        """
        if not work.fetch and not work.describe:
            return _NOTHING
        responses, table = cls(work=work, counts=counts, limit=limit), values.table
        if values.growing:
            values.densify([*work.fetch, *work.describe])
        with inference_mode(True):
            for position, handle in enumerate(work.fetch):
                value = table[handle] if handle in table else Poison(no_such_value(work.sequence, handle))
                responses._deliveries.append(_start(value, work, runtime, limit if position < BUFFERS else -1))
        counts.described_values += len(work.describe)
        responses.descriptions = [
            _describe(table[handle] if handle in table else Poison(no_such_value(work.sequence, handle)), work)
            for handle in work.describe
        ]
        return responses

    def finish(self) -> None:
        """Wait for the copies, and fill `results` and `body`.

        Small values are copied once more, because this is cheaper than sending them as buffers of their own.
        """
        work, counts, limit = self._work, self._counts, self._limit
        if work is None or counts is None:
            return
        failure_texts: FailureTexts | None = None
        with inference_mode(True):
            for delivery in self._deliveries:
                result = delivery if isinstance(delivery, Failure) else _finish(delivery, work, limit)
                if isinstance(result, Failure):
                    failure_texts = failure_texts or FailureTexts()
                    self.results.append(failure_texts.truncate(result))
                    counts.poisoned_results += 1
                else:
                    header, data = result
                    limit -= data.nbytes
                    self.results.append(header)
                    self.body.append(data if data.nbytes > COPIED_AT_ONCE else bytes(data))
        if self.descriptions:
            texts = failure_texts or FailureTexts()
            self.descriptions = [
                texts.truncate(description) if isinstance(description, Failure) else description
                for description in self.descriptions
            ]


_NOTHING: Final = Responses()


class FailureTexts:
    """Truncates the messages of a reply's failures, so that all failures fit into the reply."""

    def __init__(self) -> None:
        self._characters = 0

    def truncate(self, failure: Failure) -> Failure:
        """Return the failure, with a truncated message if the messages of the reply are too long together."""
        self._characters += len(failure.message)
        if self._characters <= limits.FAILURE_TEXTS:
            return failure
        return msgspec.structs.replace(failure, message=failure.message[: limits.FAILURE_BEGINNING])


def _start(
    value: Any, work: RunRequest, runtime: DeviceRuntime, free_bytes: int
) -> Failure | Callable[[], torch.Tensor]:
    tensor = value
    if type(value) is not torch.Tensor:
        if isinstance(value, Poison):
            return value.failure
        if not isinstance(value, torch.Tensor | bool | int | float | complex | None):
            return Failure(work.sequence, -1, "fetch", "TypeError", f"a {type(value).__name__} cannot be fetched")
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(0 if value is None else value)
    if free_bytes < 0:
        reason = f"a reply has at most {BUFFERS:,} tensors: fetch the remaining ones after it"
        return Failure(work.sequence, -1, "fetch", "RuntimeError", reason)
    if tensor.ndim > DIMENSIONS:
        return _too_many_dimensions(tensor, work)
    if (large := _too_large(tensor, free_bytes)) is not None:
        return Failure(work.sequence, -1, "fetch", "RuntimeError", large)
    try:
        return runtime.start_delivery(tensor)
    except Exception as error:
        return _fetch_failure(error, work)


def _finish(
    delivery: Callable[[], torch.Tensor], work: RunRequest, free_bytes: int
) -> Failure | tuple[TensorHeader, memoryview]:
    try:
        tensor = delivery()
        if (large := _too_large(tensor, free_bytes)) is not None:
            return Failure(work.sequence, -1, "fetch", "RuntimeError", large)
        return tensor_to_wire(tensor)
    except Exception as error:
        return _fetch_failure(error, work)


def _too_large(tensor: torch.Tensor, free_bytes: int) -> str | None:
    """Return an error message if a tensor exceeds the free bytes of a reply, else None."""
    if min(tensor.nbytes, tensor.untyped_storage().nbytes()) <= free_bytes:  # an expanded tensor is sent unexpanded
        return None
    return f"a tensor of {tensor.nbytes:,} bytes exceeds the {free_bytes:,} free bytes of a reply: fetch it in parts"


def _fetch_failure(error: Exception, work: RunRequest) -> Failure:
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
