"""Devices that count: a plugin for executors of the GPU report.

`watched-cuda` is `cuda` with more memory figures: page-locked memory, and the synchronisations that PyTorch warns of, by place. Djinn waits for
events alone, and PyTorch does not warn of those. `watched-fakegpu` counts by itself, and takes a fault from `GPU_REPORT_FAULT`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from djinn.hooks import Device, DeviceRuntime, hookimpl
from djinn_cuda.device import CudaDevice
from djinn_fakegpu.device import FakeGpuDevice, Settings

if TYPE_CHECKING:
    from djinn.planning import DeviceCapabilities

djinn_api_version = "2.0"


class _Watched(Device):
    chosen_by_name = True

    def __init__(self, device: Device) -> None:
        self.name, self._device = f"watched-{device.name}", device

    def select(self, index: int) -> int:
        return self._device.select(index)

    def discover(self) -> Sequence[DeviceCapabilities]:
        return self._device.discover()

    def open(self, index: int) -> DeviceRuntime:
        runtime = self._device.open(index)
        if self._device.name == "cuda":
            return _WatchedCuda(runtime.device)
        if fault := os.environ.get("GPU_REPORT_FAULT"):
            from djinn_fakegpu.control import inject

            kind, op = fault.split()
            inject(kind, op)  # type: ignore[arg-type]
        return runtime


class _WatchedCuda(DeviceRuntime):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._places: Counter[str] = Counter()
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = self._note

    def _note(self, message: object, *_: Any) -> None:
        if "synchronizing" in str(message):
            frame = sys._getframe(1)
            while frame.f_back is not None and "djinn_" not in frame.f_code.co_filename:
                frame = frame.f_back
            self._places[f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1

    def memory(self) -> Mapping[str, int]:
        places = {f"synchronizations at {place}": count for place, count in self._places.items()}
        pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
        return {**super().memory(), **places, "pinned_bytes_peak": pinned}


@hookimpl
def djinn_register_devices() -> Iterable[Device]:
    return [_Watched(CudaDevice()), _Watched(FakeGpuDevice(Settings(memory_mib=1024)))]
