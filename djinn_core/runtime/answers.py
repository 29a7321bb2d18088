"""What an executor answered, as tensors, descriptions and errors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec
import torch

from djinn_core.hookspecs.transports import Buffer
from djinn_core.interception.port import DescribedValue
from djinn_core.ir.values import tensor_meta
from djinn_core.runtime.failures import Failures
from djinn_core.runtime.pending import Pending
from djinn_core.wire.message import Failure
from djinn_core.wire.messages import Completed, Described
from djinn_core.wire.tensors import dtype_from_name, tensor_from_wire


@attrs.frozen
class AnswerReader:
    """Reads the answers of one executor, which has `number` in its pool; what failed is raised as the op's error."""

    failures: Failures
    number: int

    def failed(self, completed: Completed, pending: Pending, *, excused: bool) -> None:
        """Remember what failed; where it is `excused`, only those who look at what depends on it hear of it."""
        nodes = pending.prepared.nodes if pending.prepared is not None else ()
        run = (self.number, completed.sequence)
        if excused:
            self.failures.remember(run, pending.program, nodes)
        else:
            self.failures.note(run, [self._own(f) for f in completed.failures], pending.program, nodes)

    def tensors(self, completed: Completed, body: Sequence[Buffer]) -> tuple[torch.Tensor, ...]:
        """What was fetched.

        Raises:
            RemoteError: one of them could not be computed.
        """
        buffers = iter(body)
        tensors: list[torch.Tensor] = []
        for result in completed.results:
            if isinstance(result, Failure):
                raise self.failures.error(self._own(result))
            tensors.append(tensor_from_wire(result, next(buffers)))
        return tuple(tensors)

    def described(self, completed: Completed) -> tuple[DescribedValue, ...]:
        """What was described.

        Raises:
            RemoteError: one of them could not be computed.
        """
        return tuple([self._described(one) for one in completed.described])

    def _described(self, described: Described | Failure) -> DescribedValue:
        if isinstance(described, Failure):
            raise self.failures.error(self._own(described))
        dtype = dtype_from_name(described.dtype)
        meta = tensor_meta(described.shape, described.stride, described.offset, dtype)
        return DescribedValue(meta, described.scalar)

    def _own(self, failure: Failure) -> Failure:
        """A failure with the number of the executor that it happened on, which is this one unless it says otherwise."""
        return failure if failure.executor else msgspec.structs.replace(failure, executor=self.number)
