"""The run strategy `graphs`: record hot templates as graphs of an accelerator, such as CUDA graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from djinn_core.hookspecs import hookimpl
from djinn_core.logs import get_logger
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.hookspecs.run_strategies import RunStrategy, StrategyContext
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.storage_names import StorageNames
from djinn_strategies.compiling.growing_region import GrowingRegion
from djinn_strategies.compiling.hot_template import AdoptedPhase, CompilationJob
from djinn_strategies.compiling.hot_templates import HotTemplates
from djinn_strategies.compiling.padded_steps import UnpaddableError
from djinn_strategies.compiling.recorded_region import SKIPPED_OPS, RecordedRegion

djinn_api_version = "2.0"
MAYBE_DYNAMIC_OPS: Final = frozenset({"aten::index.Tensor"})  # a mask as index makes result sizes depend on data
_log = get_logger("djinn.server")


class GraphRecorder(HotTemplates):
    """Record the hot templates of fixed shapes on one device.

    Each graph has its own memory pool, because in a shared pool its replay would overwrite results of another graph
    that sessions still hold.

    Attributes:
        runtime: the device.
        settings: numeric settings, which influence the choice of kernels.
        names: names of storages by content (`StorageNames`). A replay invalidates the names of its results.
        captures: number of graphs that were recorded since the executor started.
    """

    name = "graphs"
    on_request = True
    skipped = SKIPPED_OPS
    maybe_dynamic = MAYBE_DYNAMIC_OPS
    runtime: DeviceRuntime
    settings: ProcessNumericSettings
    names: StorageNames

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self._growing = GrowingGraphs(self)
        self._regions: weakref.WeakSet[RecordedRegion] = weakref.WeakSet()
        self._stream: torch.Stream | None = None

    def begin(self, context: StrategyContext) -> bool:
        """Return True if the device is an accelerator, as in `RunStrategy.begin`."""
        device = context.device
        self.runtime, self.settings, self.names = device.runtime, device.numeric_settings, device.names
        if self.runtime.device.type == "cpu":
            _log.warning("--graphs has no effect: only an accelerator records graphs", device=str(self.runtime.device))
            return False
        if not device.arbiter.joins_sessions:  # joined runs look at strides
            device.arbiter.register(self._growing)
        return True

    def submit(self, job: CompilationJob) -> None:
        """Prepare to record a region at its next run, as `HotTemplates.submit` does."""
        if job.compiler:
            job.hot.give_up(job.hot.refusal)
        elif job.relation.base is not None:
            job.hot.give_up("its sizes vary from run to run, and a graph has fixed sizes")
        else:
            self.start_checking(job, RecordedRegion(job, self))

    def start_checking(self, job: CompilationJob, region: RecordedRegion) -> None:
        """Start to check a region, and include its recordings in the counters."""
        with self._lock:
            self._regions.add(region)
        job.hot.start_checking(job, region)

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor], int]:
        """Record the kernel launches of `run`, as `Recorder.record` does."""
        device = self.runtime.device
        if self._stream is None:
            self._stream = torch.Stream(device)
        # Only calls of this thread are recorded: threads of other sessions may copy on the device meanwhile.
        graph, recording = _new_graph()
        with self._stream, recording:
            before = torch.accelerator.memory_reserved(device)
            results = tuple(run())
        self.captures += 1
        stream = torch.accelerator.current_stream(device)
        for result in results:
            result.record_stream(stream)
        return graph.replay, results, torch.accelerator.memory_reserved(device) - before

    def free(self, *, dead: bool = False) -> None:
        """Drop recordings, because device memory is short. Templates that stay hot are recorded again later.

        `dead`: True to drop only recordings whose weights were freed.
        """
        with self._lock:
            regions = list(self._regions)
        for region in regions:
            region.drop_recordings(only_dead=dead)

    def figures(self) -> Mapping[str, float]:
        """Return the counters, the numbers of recorded templates and graphs, and the bytes of the graphs."""
        with self._lock:
            regions = list(self._regions)
        recordings = [recording for region in regions for recording in region.recordings]
        return {
            "graph_captures": self.captures,
            "graphs_unused": self.counts.unused,
            "graph_runs": self.counts.runs,
            "recorded_templates": sum(
                isinstance(phase, AdoptedPhase) for phase in (*self.phases(), *self._growing.phases())
            ),
            "recorded_graphs": len(recordings),
            "recorded_graph_bytes": sum(recording.nbytes for recording in recordings),
        }


class GrowingGraphs(HotTemplates):
    """Record hot templates whose sizes grow at each run, such as decode steps, as graphs of fixed capacity.

    In these graphs, attention rounds differently than the ops do.
    """

    name = "growing-graphs"
    exact = False
    counters = True
    skipped = SKIPPED_OPS
    maybe_dynamic = MAYBE_DYNAMIC_OPS

    def __init__(self, recorder: GraphRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def submit(self, job: CompilationJob) -> None:
        """Prepare to record a region at its next run, as `HotTemplates.submit` does."""
        if job.compiler:
            job.hot.give_up(job.hot.refusal)
        elif job.relation.base is None:
            job.hot.give_up("its sizes are fixed")
        else:
            try:
                self._recorder.start_checking(job, GrowingRegion(job, self._recorder))
            except UnpaddableError as error:
                job.hot.give_up(str(error))


def _new_graph() -> tuple[Any, Any]:
    """Return a graph, and a context manager that records into it. PyTorch before 2.13 has graphs only for CUDA."""
    graph: Any
    if hasattr(torch.accelerator, "Graph"):
        graph = torch.accelerator.Graph(capture_error_mode="thread_local")
        return graph, graph
    graph = torch.cuda.CUDAGraph()
    return graph, torch.cuda.graph(graph, capture_error_mode="thread_local")


@hookimpl
def djinn_register_run_strategies() -> Iterable[RunStrategy]:
    """Register the run strategy `graphs`."""
    return [GraphRecorder()]
