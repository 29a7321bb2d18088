"""The device `watched-cuda`: a plugin for executors of the GPU report.

It is `cuda` with little memory and further memory figures: page-locked memory, and the synchronisations that PyTorch
warns of, by place. Djinn waits only for events, of which PyTorch does not warn.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from djinn.hooks import Device, DeviceRuntime, hookimpl
from djinn_cuda.device import CudaDevice
from evaluation.gpu.frames import memory_of

if TYPE_CHECKING:
    from djinn.planning import DeviceCapabilities

djinn_api_version = "2.0"


class _WatchedDevice(Device):
    name = "watched-cuda"
    chosen_by_name = True
    _device = CudaDevice()

    def select(self, index: int) -> int:
        return self._device.select(index)

    def discover(self) -> Sequence[DeviceCapabilities]:
        return self._device.discover()

    def open(self, index: int) -> DeviceRuntime:
        return _WatchedRuntime(self._device.open(index).device)


class _WatchedRuntime(DeviceRuntime):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._places: Counter[str] = Counter()
        torch.cuda.set_per_process_memory_fraction(memory_of("cuda") / torch.cuda.mem_get_info(device)[1], device)
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
        pinned_bytes = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
        return {**super().memory(), **places, "pinned_bytes_peak": pinned_bytes}


@hookimpl
def djinn_register_devices() -> Iterable[Device]:
    return [_WatchedDevice()]
