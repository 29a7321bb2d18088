"""The compiler `cudagraphs`: records the kernel launches of a template once, and replays them as one graph launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import torch

from djinn.hooks import Compiler, CompilerContext, Replay

WARM_RUNS: Final = 1  # the executor checks the results of two runs, so the second run must use a recording
RECORDINGS: Final = 4  # of one template
Graph = Callable[..., Sequence[torch.Tensor]]
Launch = Callable[[], None]


class Recorder(Protocol):
    """Record the kernel launches of a function."""

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[Launch, Sequence[torch.Tensor]]:
        """Return a function that replays the kernel launches of `run`, and the tensors that receive its results."""


class CudaGraphs(Compiler):
    """Launches PyTorch's ops as one graph, for templates that are bound by kernel launches."""

    name = "cudagraphs"

    def compile(self, context: CompilerContext) -> Replay | None:
        """Return None if sizes vary between runs or the device has no graphs."""
        if context.device.type != "cuda" or context.grows:
            return None
        return RecordedRuns(context.graph_module, GraphRecorder(context.device), context.writes)


class GraphRecorder:
    """Records graphs in a private memory pool, on a separate stream, as capturing requires."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[Launch, Sequence[torch.Tensor]]:
        """Record a function, as `Recorder.record`."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Other sessions' threads may use the GPU meanwhile, for uploads: only this thread's calls are recorded.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            results = tuple(run())
        return graph.replay, results


@attrs.frozen
class Recording:
    """A recorded graph.

    Attributes:
        launch: launches the graph.
        results: tensors that receive the results.
        in_place: addresses of inputs that the graph reads in place, by input index.
        buffers: fixed memory for all other inputs, by input index.
    """

    launch: Launch
    results: Sequence[torch.Tensor]
    in_place: Mapping[int, int]
    buffers: Mapping[int, torch.Tensor]

    def run(self, inputs: Sequence[torch.Tensor], writes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Launch the graph with these inputs, and return copies of its results."""
        for index, buffer in self.buffers.items():
            buffer.copy_(_memory_of(inputs[index]))
        for index, address in self.in_place.items():
            assert inputs[index].data_ptr() == address, f"input {index} has moved since the graph was recorded"
        self.launch()
        for index in writes:
            if index in self.buffers:
                _memory_of(inputs[index]).copy_(self.buffers[index])
        return [result.clone() for result in self.results]


class RecordedRuns:
    """Run a graph eagerly at first, then as a recording.

    A recording reads and writes fixed memory. An input that had one address in all runs, such as a weight, is read in place.
    Any other input has a buffer. The input is copied to the buffer before a launch, and back if the graph writes it. If an
    in-place input moves, the recording is dropped, and the next recording has a buffer for this input. After `RECORDINGS`
    recordings the graph always runs eagerly.
    """

    def __init__(self, graph: Graph, recorder: Recorder, writes: Sequence[int] = ()) -> None:
        self._graph, self._recorder, self._writes = graph, recorder, writes
        self._runs = 0
        self._recordings = 0
        self._in_place: dict[int, int] = {}
        self._recording: Recording | None = None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run once and return the results in new memory."""
        self._runs += 1
        self._note_addresses([tensor.data_ptr() for tensor in inputs])
        if self._recording is None and self._runs > WARM_RUNS and self._recordings < RECORDINGS:
            self._recordings += 1
            self._recording = self._record(inputs)
        if self._recording is None:
            return self._graph(*inputs)
        return self._recording.run(inputs, self._writes)

    def _note_addresses(self, addresses: Sequence[int]) -> None:
        """Drop the recording if an in-place input has moved."""
        if self._runs == 1:
            self._in_place = dict(enumerate(addresses))
        moved = [index for index, address in self._in_place.items() if addresses[index] != address]
        for index in moved:
            del self._in_place[index]
            self._recording = None

    def _record(self, inputs: Sequence[torch.Tensor]) -> Recording:
        moving = [index for index in range(len(inputs)) if index not in self._in_place]
        buffers = {index: _memory_of(inputs[index]).clone() for index in moving}
        given = list(inputs)
        for index, buffer in buffers.items():
            given[index] = buffer.as_strided(inputs[index].shape, inputs[index].stride(), 0)
        launch, results = self._recorder.record(lambda: self._graph(*given))
        return Recording(launch, results, dict(self._in_place), buffers)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory from a tensor's first to its last element, gaps included: ops of the graph may depend on strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))
