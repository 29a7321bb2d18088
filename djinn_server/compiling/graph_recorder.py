"""The run strategy `graphs`: records hot templates of fixed shape as graphs of an accelerator."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from djinn_core.system.lru import LruCache
from djinn_server.compiling.hot_template import (
    AdoptedPhase,
    CompilationCounters,
    CompilationJob,
    HotTemplate,
    Thresholds,
)
from djinn_server.compiling.recorded_region import RecordedRegion
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, TemplateFacts
from djinn_server.running.arbiter import ServedFacts
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.storage_names import StorageNames

TEMPLATES: Final = 1024  # that are counted


class GraphRecorder(RunStrategy):
    """Counts the runs of all templates on a device, and records the hot ones whose shapes do not vary.

    Each graph has its own memory pool. In a shared pool, a replay would write into results of another graph that sessions still hold.

    Attributes:
        runtime: the device. settings: numeric settings, which choose kernels. names: names of storages, which replays write into.
        counts: counters since the executor began. captures: recorded graphs since then.
    """

    name = "graphs"

    def __init__(self, runtime: DeviceRuntime, settings: ProcessNumericSettings, names: StorageNames) -> None:
        self.runtime, self.settings, self.names = runtime, settings, names
        self.counts, self.captures = CompilationCounters(), 0
        self._thresholds = Thresholds()
        self._templates: LruCache[bytes, HotTemplate] = LruCache(TEMPLATES)
        self._regions: weakref.WeakSet[RecordedRegion] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stream: torch.Stream | None = None

    def acts_on(self, template: TemplateFacts) -> RunOffer:
        """Return the record of a template, which all sessions share."""
        assert isinstance(template, ServedFacts)
        with self._lock:
            hot = self._templates.use(template.digest)
            if hot is None:
                name = template.digest.hex()[:8]
                hot = HotTemplate(template.template, self._thresholds, self._begin, name, self.counts)
                for evicted in self._templates.store(template.digest, hot):
                    evicted.leave("others are used more")
        return hot

    def _begin(self, job: CompilationJob) -> None:
        if job.compiler:
            job.hot.leave("its graph is not used")
        elif job.law.base is not None:
            job.hot.leave("its sizes vary from run to run, which a graph cannot")
        else:
            region = RecordedRegion(job, self)
            with self._lock:
                self._regions.add(region)
            job.hot.check(job, region)

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Callable[[], None], Sequence[torch.Tensor], int]:
        """Record kernel launches, as `Recorder.record` does."""
        device = self.runtime.device
        if self._stream is None:
            self._stream = torch.Stream(device)
        # Threads of other sessions may use the device meanwhile, for copies: only calls of this thread are recorded.
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
        """Drop all recordings, because memory is short; `dead`: those whose weights are gone. Hot templates are recorded anew later."""
        with self._lock:
            regions = list(self._regions)
        for region in regions:
            region.forget(dead=dead)

    def figures(self) -> dict[str, int]:
        """Return the number of templates that run as graphs, of their recordings, and the device memory of these."""
        with self._lock:
            phases, regions = [hot.phase for hot in self._templates.values()], list(self._regions)
        recordings = [recording for region in regions for recording in region.recordings]
        return {
            "recorded_templates": sum(isinstance(phase, AdoptedPhase) for phase in phases),
            "recorded_graphs": len(recordings),
            "recorded_graph_bytes": sum(recording.nbytes for recording in recordings),
        }


def _new_graph() -> tuple[Any, Any]:
    """Return a graph, and the context in which it records. PyTorch before 2.13 has graphs of CUDA alone."""
    graph: Any
    if hasattr(torch.accelerator, "Graph"):
        graph = torch.accelerator.Graph(capture_error_mode="thread_local")
        return graph, graph
    graph = torch.cuda.CUDAGraph()
    return graph, torch.cuda.graph(graph, capture_error_mode="thread_local")
