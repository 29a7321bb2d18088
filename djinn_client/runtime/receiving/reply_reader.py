"""Decoding of an executor's replies into tensors, descriptions and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.sending.binding import PendingSubmission
from djinn_client.sink import DescribedValue
from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Buffer
from djinn_core.ir.values import tensor_meta
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import Completed, TensorHeader, ValueDescription
from djinn_core.wire.tensors import dtype_from_name, tensor_from_wire

_LARGEST: Final = 2**63 - 1  # the largest element count of PyTorch


class ReplyReader(msgspec.Struct, frozen=True):
    """Decode the replies of one executor. Failures are raised as errors of the op.

    Attributes:
        failures: the session's failures.
        number: number of the executor in its pool.
    """

    failures: Failures
    number: int

    def note_failures(self, completed: Completed, pending: PendingSubmission, *, unobserved: bool) -> None:
        """Record the failures in a reply. `unobserved`: True to raise them only when a failed value is used."""
        nodes = pending.prepared.nodes if pending.prepared is not None else ()
        run = (self.number, completed.sequence)
        if unobserved:
            self.failures.remember(run, pending.program, nodes)
        else:
            self.failures.note(run, [self._with_executor(f) for f in completed.failures], pending.program, nodes)

    def tensors(self, completed: Completed, body: Sequence[Buffer]) -> tuple[torch.Tensor, ...]:
        """Return the fetched tensors.

        Raises:
            RemoteError: a tensor could not be computed.
            ProtocolError: the data are not tensors.
        """
        tensors: list[torch.Tensor] = []
        buffer_count = len(body)
        for number, result in enumerate(completed.results):
            if not isinstance(result, TensorHeader):
                raise self.failures.error(self._with_executor(result))
            if number >= buffer_count:
                raise ProtocolError("the executor announced more tensors than it sent")
            tensors.append(tensor_from_wire(result, body[number]))
        return tuple(tensors)

    def described(self, completed: Completed) -> tuple[DescribedValue, ...]:
        """Return the requested descriptions of values, in the order of the request.

        Raises:
            RemoteError: a value could not be computed.
        """
        return tuple([self._read_description(description) for description in completed.described])

    def _read_description(self, description: ValueDescription | Failure) -> DescribedValue:
        if isinstance(description, Failure):
            raise self.failures.error(self._with_executor(description))
        if not _is_possible(description.shape, description.stride):
            raise ProtocolError(
                f"the executor described an impossible tensor, of shape {description.shape} and stride {description.stride}"
            )
        dtype = dtype_from_name(description.dtype)
        meta = tensor_meta(description.shape, description.stride, description.offset, dtype)
        return DescribedValue(meta, description.scalar)

    def _with_executor(self, failure: Failure) -> Failure:
        """Return a failure with this executor's number, unless the failure names another executor."""
        return failure if failure.executor else msgspec.structs.replace(failure, executor=self.number)


def _is_possible(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if PyTorch can count the elements of such a tensor."""
    if len(shape) != len(stride) or min((*shape, *stride), default=0) < 0:
        return False
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    return max(math.prod(shape), extent) <= _LARGEST
