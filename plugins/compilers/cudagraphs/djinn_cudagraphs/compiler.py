"""The compiler: records what a template launches on the GPU once, and launches all of it at a stroke from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from djinn.hooks import CompilerContext, Replay

WARM_RUNS: Final = 3  # before anything is recorded: libraries choose kernels and take memory in their first runs
RECORDINGS: Final = 4  # of one template, for inputs that moved
Graph = Callable[..., Sequence[torch.Tensor]]


class CudaGraphs:
    """PyTorch's ops as they are, launched as one graph. What costs is launching many small kernels, not running them."""

    name = "cudagraphs"

    def compile(self, context: CompilerContext) -> Replay | None:
        """None if sizes differ from run to run, or where the device has no graphs."""
        if context.device.type != "cuda" or context.grows:
            return None
        return RecordedRuns(context.graph_module, GraphRecorder(context.device), context.writes)


class GraphRecorder:
    """Records graphs in a private pool of memory, on a stream of its own, as capturing demands."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[Callable[[], None], Sequence[torch.Tensor]]:
        """A function that launches what `run` launches, and the tensors that it writes its results into."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # Threads of other sessions may use the GPU meanwhile, for uploads: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            results = tuple(run())
        return graph.replay, results


class RecordedRuns:
    """Runs a graph as it is at first, then as it was recorded.

    A recording reads and writes fixed memory. Inputs that lay elsewhere at each warm run are copied into buffers before a
    launch, and those that are written are copied back after it; the others, such as weights, are read where they lie,
    and the recording is made again when one of them has moved. Results are copied out: the next launch overwrites them.
    """

    def __init__(self, graph: Graph, recorder: GraphRecorder, writes: Sequence[int] = ()) -> None:
        self._graph, self._recorder, self._writes = graph, recorder, writes
        self._warm = 0
        self._addresses: list[int] = []
        self._moving: set[int] = set()
        self._recordings = 0
        self._launch: Callable[[], None] | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        self._results: Sequence[torch.Tensor] = ()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results of one run."""
        moved = self._note(inputs)
        if self._warm < WARM_RUNS or (moved and self._recordings >= RECORDINGS):
            self._warm += 1
            return self._graph(*inputs)
        if self._launch is None or moved:
            self._record(inputs)
        for index, buffer in self._buffers.items():
            buffer.copy_(inputs[index])
        assert self._launch is not None
        self._launch()
        for index in self._writes:
            if index in self._buffers:
                inputs[index].copy_(self._buffers[index])
        return [result.clone() for result in self._results]

    def _note(self, inputs: Sequence[torch.Tensor]) -> bool:
        """True if an input whose address had been constant has another address now."""
        addresses = [tensor.data_ptr() for tensor in inputs]
        found = {i for i, (a, b) in enumerate(zip(self._addresses, addresses, strict=False)) if a != b}
        new = found - self._moving
        self._moving |= new
        self._addresses = addresses
        return bool(new)

    def _record(self, inputs: Sequence[torch.Tensor]) -> None:
        self._recordings += 1
        self._buffers = {index: inputs[index].clone() for index in self._moving}
        given = [self._buffers.get(index, tensor) for index, tensor in enumerate(inputs)]
        self._launch, self._results = self._recorder.record(lambda: self._graph(*given))
