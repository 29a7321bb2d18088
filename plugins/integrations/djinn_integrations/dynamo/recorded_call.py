"""Recorded calls: instructions that are recorded once and later appended in bulk, as in CUDA graph replay.

A guarded compiled function always records the same ops for inputs of the same metadata. So the function need not run again:
its instructions are appended with other values, without dispatch and without tensors for intermediate results.
`djinn_native/csrc/graph.cpp` stores and appends them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.entry import SentEntries
from djinn_client.interception.recording.recorder import Recorder, current
from djinn_client.interception.tap import taps
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.upload import upload_copy

CONSTANTS_LIMIT = 1 << 20  # bytes of uploads that a recorded call keeps


class RecordedCall:
    """A recording of a function call whose instructions can be appended with other inputs."""

    def __init__(self, graph: int, other_results: Sequence[tuple[int, Any]]) -> None:
        """Create a recorded call.

        Args:
            graph: number of the recording in C++.
            other_results: positions and values of results that are not tensors.
        """
        self._graph = graph
        self._other_results = other_results
        weakref.finalize(self, ops.drop_graph, graph).atexit = False

    def record(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Append the call's instructions with `inputs`, which have the same `graph_key` as in the recording. Return the results."""
        begun = perf_counter()
        outputs: list[Any] = ops.replay_graph(self._graph, inputs)
        for place, other in self._other_results:
            outputs.insert(place, other)
        for notify in taps.op:
            notify("recorded call", begun, perf_counter())
        return outputs


def record_call(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Any, RecordedCall | None]:
    """Call `function` with `inputs`. Return its result (a sequence) and a recording of the call.

    The recording is None if the call cannot be repeated, for example because the function waited for a result.
    """
    recorder = current()
    entries = SentEntries()
    start, before = recorder.unsent, recorder.fixed
    uploads, recorder.constants = recorder.constants, []
    recorder.captures.append(entries)
    recorder.fixed = recorder.entries[-1] if start else None
    epoch = recorder.epoch
    try:
        outputs = function(*inputs)
        disturbed = recorder.epoch != epoch or entries.entries or taps.recorded
        return outputs, None if disturbed else _recorded(recorder, start, inputs, outputs)
    finally:
        recorder.constants = uploads
        recorder.fixed = before
        recorder.captures = [c for c in recorder.captures if c is not entries]


def _recorded(recorder: Recorder, start: int, inputs: Sequence[torch.Tensor], outputs: Any) -> RecordedCall | None:
    """Return a recording of the recorder's entries from index `start` on, or None if they cannot be repeated."""
    uploads = [*(recorder.constants or ())]
    if not isinstance(outputs, (list, tuple)) or sum(data.nbytes for _, data, _ in uploads) > CONSTANTS_LIMIT:
        return None
    if any(call.changes for call in recorder.entries.calls[start:]):
        return None  # an operand becomes a different tensor afterwards
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    if not all(isinstance(tensor, LazyTensor) and not tensor.requires_grad for tensor in tensors):
        return None
    constants = [upload_copy(data, device) for _, data, device in uploads]
    graph = ops.record_graph(start, inputs, [handle for handle, _, _ in uploads], constants, tensors)
    others = [(place, other) for place, other in enumerate(outputs) if not isinstance(other, torch.Tensor)]
    return RecordedCall(graph, others) if graph else None
