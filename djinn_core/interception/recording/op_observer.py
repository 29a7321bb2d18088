"""Observer interface for every op that a thread records, as `djinn.verify()` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from djinn_core.interception.recording.recorder import SyncRequest, current
from djinn_core.interception.sync import fetch
from djinn_core.interception.tensors.chunked_fetch import PART_BYTES
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.program import Call, Slot


class OpObserver(Protocol):
    """Observer that is called before and after each op of a thread is recorded. Its own ops are not reported to it."""

    def before(self, call: Call, operands: Sequence[LazyTensor]) -> None:
        """`call` is about to be recorded with these operands."""

    def after(
        self,
        call: Call,
        slots: Sequence[Slot],
        operands: Sequence[LazyTensor],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        """`call` was recorded with these scalars, and `results` stand for what it returns (for operands that it writes: themselves)."""


def fetch_all(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """The elements of several tensors on the CPU, in as few round trips as their sizes allow.

    Raises:
        RemoteError: one of them could not be computed.
    """
    fetched: list[torch.Tensor] = []
    group: list[LazyTensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.remote.meta.nbytes
        if group and size + nbytes > PART_BYTES:
            fetched += _fetch_group(group)
            group, size = [], 0
        group.append(tensor)
        size += nbytes
    return fetched + _fetch_group(group)


def _fetch_group(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    if len(tensors) < 2:
        return [fetch(tensor) for tensor in tensors]
    recorder = current()
    for tensor in tensors:
        recorder.order_after(tensor.remote.storage)
    return list(recorder.ask(SyncRequest(fetch=tuple(tensor.remote.handle for tensor in tensors))).tensors)
