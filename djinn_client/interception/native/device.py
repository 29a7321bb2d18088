"""Answers to what C++ asks about the device: the number of indexes, and its memory."""

from __future__ import annotations

from djinn_client.interception.device import memory
from djinn_client.interception.device.current_device import existing_index
from djinn_client.interception.native.library import implement
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_client.tracebacks import for_users


def _device_count() -> int:
    return port.device_count()


@for_users
def _check_index(index: int) -> None:
    existing_index(logical_device(index))


def _memory(what: str, index: int) -> list[int]:
    match what:
        case "stats":
            found = memory.memory_stats(index)
            return [
                found[f"{name}_bytes.all.{when}"] for name in ("allocated", "reserved") for when in ("current", "peak")
            ]
        case "info":
            return list(memory.mem_get_info(index))
        case "empty_cache":
            memory.empty_cache()
        case "reset_peak":
            memory.reset_peak_memory_stats(index)
        case "reset_accumulated":
            memory.reset_accumulated_memory_stats(index)
    return []


def register() -> None:
    """Have C++ call these."""
    implement(device_count=_device_count, check_index=_check_index, memory=_memory)
