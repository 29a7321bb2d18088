"""State shared by the sessions of a device: turns, the random generator, compiled templates, memory, and PyTorch's numeric settings."""

from __future__ import annotations

import msgspec

from djinn_core import torch_private
from djinn_core.hookspecs.devices import DeviceRuntime, Timekeeper
from djinn_core.server.compiling.compilation_queue import CompilationQueue
from djinn_core.server.memory.limited import ledger_of
from djinn_core.server.running.bound_templates import CompiledTemplates
from djinn_core.server.running.fair_share import FairShare
from djinn_core.server.running.own_operators import own_operators
from djinn_core.server.running.random_state import DeviceRandomness
from djinn_core.wire.numeric_messages import NumericSettings


class ProcessNumericSettings:
    """The numeric settings of this process: those of the last session that ran, or, for sessions that have none, those of the start.

    Attributes:
        now: the session's settings that hold now.
    """

    def __init__(self) -> None:
        self._first: NumericSettings | None = None
        self.now: NumericSettings | None = None

    def compute_under(self, settings: NumericSettings | None) -> None:
        """Have the process compute under a session's settings. Called under the device's lock."""
        if settings is self.now:
            return
        if self._first is None:
            self._first = NumericSettings(**torch_private.numeric_settings())
        torch_private.set_numeric_settings(msgspec.structs.asdict(settings or self._first))
        self.now = settings


class SharedDevice:
    """A device that several sessions of this process take turns on."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.turns = FairShare()
        self.randomness = DeviceRandomness(runtime.device)
        self.numeric_settings = ProcessNumericSettings()
        self.own = own_operators(runtime, self.randomness)
        self.templates = CompiledTemplates()
        self.compiling: CompilationQueue | None = None
        self.ledger = ledger_of(runtime)
        self.timekeeper = runtime if isinstance(runtime, Timekeeper) else None
