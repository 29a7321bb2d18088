"""State shared by the sessions of a device: turns, the random generator, compiled templates, memory, and PyTorch's numeric settings."""

from __future__ import annotations

from djinn_server.batching.session_batches import SessionBatches
from djinn_server.batching.weights import PackedWeights
from djinn_server.compiling.compilation_queue import CompilationQueue
from djinn_server.compiling.graph_recorder import GraphRecorder
from djinn_server.device_watch import DeviceWatch
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.memory.limited import ledger_of
from djinn_server.running.arbiter import Arbiter
from djinn_server.running.bound_templates import CompiledTemplates
from djinn_server.running.cached_results import CachedResultsTable
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.fair_share import FairShare
from djinn_server.running.issued_turns import IssuedTurns
from djinn_server.running.lanes import Lanes
from djinn_server.running.own_operators import own_operators
from djinn_server.running.packed_products import PackedProducts
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.random_state import DeviceRandomness
from djinn_server.running.storage_names import StorageNames


class SharedDevice:
    """A device that several sessions of this process take turns on."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.timer = DeviceTimer(runtime)
        self.turns = FairShare(
            IssuedTurns(runtime) if self.timer.runs_late else None,
            simulated=runtime.take_seconds if runtime.keeps_time else None,
        )
        self.randomness = DeviceRandomness(runtime.device)
        self.numeric_settings = ProcessNumericSettings()
        self.lanes = Lanes(runtime.device)
        self.own = own_operators(runtime, self.timer, self.randomness)
        self.templates = CompiledTemplates()
        self.arbiter = Arbiter(runtime.device, self.timer)
        self.compiling: CompilationQueue | None = None
        self.graphs: GraphRecorder | None = None
        self.batches: SessionBatches | None = None
        self.packed: PackedWeights | None = None
        self.names = StorageNames(runtime)
        self.cached_results = CachedResultsTable()
        self.ledger = ledger_of(runtime)
        if self.ledger is not None:
            self.ledger.cached = self.cached_results
        self.watch = DeviceWatch(runtime) if self.timer.runs_late else None
        self.timekeeper = runtime if runtime.keeps_time else None

    def begin_compiling(self, compiling: CompilationQueue) -> None:
        """Have hot templates compiled from now on."""
        self.compiling = compiling
        self.arbiter.register(compiling)

    def begin_recording(self) -> None:
        """Record hot templates of fixed shape as graphs from now on."""
        self.graphs = GraphRecorder(self.runtime, self.numeric_settings, self.names)
        self.arbiter.register(self.graphs)
        if self.ledger is not None:
            self.ledger.free_graphs = self.graphs.free

    def begin_packing(self) -> None:
        """Compute products from packed copies of their weights from now on, where clients allow other rounding."""
        strategy = PackedProducts(self.runtime, self.own)
        self.packed = strategy.packed
        self.arbiter.register(strategy)

    def begin_batching(self) -> None:
        """Run the same template of several sessions together from now on, where their clients allow it."""
        self.batches = SessionBatches(self.runtime, self.timer, self.turns, self.randomness, self.numeric_settings)
