"""Device statistics that an executor reports: memory in bytes, processors, compute capability."""

from __future__ import annotations

import os

import torch

from djinn_core.hookspecs.devices import DeviceRuntime


def device_figures(runtime: DeviceRuntime) -> dict[str, int]:
    """The device's memory figures in bytes, as `device_total` and so on, and its number of processors."""
    memory = {f"device_{name}": int(value) for name, value in runtime.memory().items()}
    if runtime.device.type == "cpu":
        return memory | {"multi_processor_count": os.cpu_count() or 1}
    properties = torch.get_device_module(runtime.device.type).get_device_properties(runtime.device)
    names = ("multi_processor_count", "major", "minor")
    return memory | {name: int(getattr(properties, name, 0)) for name in names}


def reset_device_peak(device: torch.device) -> None:
    """Have the device's allocator count its peak again, where it has one."""
    if device.type != "cpu":
        torch.get_device_module(device.type).reset_peak_memory_stats(device)
