"""State that the sessions of a device share: turns, random state, templates, memory, numeric settings."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_core.hookspecs.operators import OperatorLibrary
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
from djinn_server.running.process_settings import ProcessNumericSettings
from djinn_server.running.random_state import DeviceRandomness
from djinn_server.running.storage_names import StorageNames


class SharedDevice:
    """A device that the sessions of this process use in turns."""

    def __init__(
        self, runtime: DeviceRuntime, libraries: Sequence[OperatorLibrary] = (), *, has_program: bool = False
    ) -> None:
        """`libraries`: as in `own_operators`. `has_program`: True if the client's program runs in this process."""
        self.runtime = runtime
        self.timer = DeviceTimer(runtime)
        self.turns = FairShare(
            IssuedTurns(runtime) if self.timer.runs_late else None,
            simulated=runtime.take_seconds if runtime.keeps_time else None,
        )
        self.randomness = DeviceRandomness(runtime.device, shared_with_program=has_program)
        self.numeric_settings = ProcessNumericSettings()
        self.lanes = Lanes(runtime.device)
        self.own = own_operators(runtime, self.timer, self.randomness, libraries)
        self.templates = CompiledTemplates()
        self.arbiter = Arbiter(runtime.device, self.timer)
        self.names = StorageNames(runtime)
        self.cached_results = CachedResultsTable()
        self.ledger = ledger_of(runtime)
        if self.ledger is not None:
            self.ledger.cache, self.ledger.free_strategies = self.cached_results, self.arbiter.free
        self.watch = DeviceWatch(runtime) if self.timer.runs_late else None
        self.timekeeper = runtime if runtime.keeps_time else None

    @property
    def is_plain(self) -> bool:
        """True on a CPU without eviction, simulated time or strategies that join sessions.

        On such a device, results may have layouts that the client did not predict.
        """
        has_neither = self.ledger is None and self.timekeeper is None
        return self.runtime.device.type == "cpu" and not self.arbiter.joins_sessions and has_neither
