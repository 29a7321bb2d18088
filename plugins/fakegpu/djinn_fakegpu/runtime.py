"""One opened device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from djinn.hooks import DeviceRuntime
from djinn_fakegpu.control import counters, now
from djinn_fakegpu.library import load


class FakeGpuRuntime(DeviceRuntime):
    """As any accelerator of PyTorch."""

    def __init__(self, index: int, figures: Mapping[str, float]) -> None:
        """Load the library, which is compiled if that was not done yet. `figures`: as for `control.configure`."""
        load(figures)
        super().__init__(torch.device("fakegpu", index))

    def memory(self) -> Mapping[str, int]:
        """Bytes by name, the counters and the clock of the device, so that a client can read them from the executor's figures."""
        return {**counters(), "clock_ns": round(now() * 1e9), **super().memory()}
