"""The runtime of an opened fakegpu device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from djinn.hooks import DeviceRuntime
from djinn_fakegpu.control import counters, now
from djinn_fakegpu.exports import Exports, open_exported
from djinn_fakegpu.library import load


class FakeGpuRuntime(DeviceRuntime):
    """Device runtime whose memory other executors of the host can open."""

    opens_memory = True

    def __init__(self, index: int, figures: Mapping[str, float]) -> None:
        """Load the library, compiled if necessary. `figures`: as for `control.configure`."""
        load(figures)
        super().__init__(torch.device("fakegpu", index))

    @cached_property
    def _exports(self) -> Exports:
        return Exports()

    def export(self, tensor: torch.Tensor) -> bytes | None:
        """Return a description of device memory, with which another executor of this host may copy it (`open`)."""
        self.mark().synchronize()
        return self._exports.add(tensor)

    def open(self, description: bytes) -> torch.Tensor:
        """Return a copy on this device of memory that another executor exported."""
        with open_exported(description) as exported:
            copy = torch.empty_like(exported, device=self.device).copy_(exported)
            self.mark().synchronize()
        return copy

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of memory by name, and the counters and clock of the device, which clients read here."""
        return {**counters(), "clock_ns": round(now() * 1e9), **super().memory()}
