"""`torch.accelerator` for the remote device: Python replacements of its C++ functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn_core.interception import sync
from djinn_core.interception.device import memory, properties, streams
from djinn_core.interception.device.current_device import current_device, index_of, set_current_device


def _device_stats(index: int) -> dict[str, Any]:
    """As PyTorch's allocators give them: nested, where the Python side joins names by dots."""
    return dict(memory.memory_stats(index))


def _exchange(index: int) -> int:
    """Make `index` the present one; the one before. Negative: nothing changes, as in PyTorch."""
    return current_device() if index < 0 else set_current_device(index_of(index))


def _capability(index: int) -> dict[str, Any]:
    found = properties.get_device_properties(index)
    return {"name": found.name, "total_memory": found.total_memory, "capability": (found.major, found.minor)}


def _synchronize(_index: int) -> None:
    sync.synchronize()


def _set_index(index: int) -> None:
    set_current_device(index_of(index))


def _nothing() -> None:
    """There is no pinned memory whose blocks could be kept."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getDeviceIndex": current_device,
    "setDeviceIndex": _set_index,
    "exchangeDevice": _exchange,
    "maybeExchangeDevice": _exchange,
    "getStream": streams.current_stream,
    "setStream": streams.set_stream,
    "synchronizeDevice": _synchronize,
    "getDeviceCapability": _capability,
    "isAllocatorInitialized": lambda: True,
    "emptyCache": memory.empty_cache,
    "emptyHostCache": _nothing,
    "getDeviceStats": _device_stats,
    "getMemoryInfo": memory.mem_get_info,
    "resetPeakStats": memory.reset_peak_memory_stats,
    "resetAccumulatedStats": memory.reset_accumulated_memory_stats,
}
