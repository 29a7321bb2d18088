"""Memory and properties of the device, with the interface of `torch.cuda.memory`.

Each query is one round trip. C++ calls some of these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djinn_client.interception.device.device_state import DeviceProperties, device_state
from djinn_client.interception.device.indexes import existing_index, index_of
from djinn_client.interception.native.library import implement
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tap import Cause, waiting_for
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_client.tracebacks import for_users
from djinn_core.wire.messages import StatsReply, StatsRequest

_NOTHING: Mapping[str, int] = {}


def figures(*, reset_peak: bool = False, device: int = 0) -> Mapping[str, int]:
    """Return counts and sizes in bytes of a logical device for this session, by the names of the executor's counters.

    The executor first runs all recorded ops.

    `reset_peak`: True to restart the executor's peak counters afterwards.
    """
    with waiting_for(Cause.FIGURES):
        return current().query(StatsRequest(reset_peak), StatsReply, device).values


def _figures_if_used(device: Any, *, reset_peak: bool = False) -> Mapping[str, int]:
    """Return `figures` of a device.

    Return an empty mapping if no op has used the device, so that a query starts no server.
    """
    index = index_of(device)
    has_work = port.is_open() or any(recorder.unsent for recorder in recorders.all())
    return figures(reset_peak=reset_peak, device=index) if has_work else _NOTHING


def memory_allocated(device: Any = None) -> int:
    """Return the bytes that this session's tensors hold. Weights that the server is still reading do not count yet."""
    return _figures_if_used(device).get("memory", 0)


def max_memory_allocated(device: Any = None) -> int:
    """Return the peak of `memory_allocated` since the session began or `reset_peak_memory_stats` was called."""
    return _figures_if_used(device).get("memory_peak", 0)


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the device's allocator holds for this session."""
    return _figures_if_used(device).get("reserved", 0)


def max_memory_reserved(device: Any = None) -> int:
    """Return a lower bound of the peak of `memory_reserved`: its present value, or the peak of allocated bytes if greater."""
    return _peak_reserved(_figures_if_used(device))


def _peak_reserved(memory: Mapping[str, int]) -> int:
    return max(memory.get("reserved", 0), memory.get("memory_peak", 0))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Restart the peak counters."""
    _figures_if_used(device, reset_peak=True)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Do nothing: the device does not count allocations."""
    index_of(device)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes of the physical device."""
    memory = figures(device=index_of(device))
    return memory.get("device_free", 0), memory.get("device_total", 0)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the statistics under the key names of `torch.cuda.memory_stats`. Statistics that are not counted are 0."""
    memory = _figures_if_used(device)
    current_and_peak = {
        "allocated_bytes": (memory.get("memory", 0), memory.get("memory_peak", 0)),
        "active_bytes": (memory.get("memory", 0), memory.get("memory_peak", 0)),
        "reserved_bytes": (memory.get("reserved", 0), _peak_reserved(memory)),
    }
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for name, (now, peak) in current_and_peak.items():
        stats |= {f"{name}.all.current": now, f"{name}.all.peak": peak}
        stats |= {f"{name}.all.allocated": 0, f"{name}.all.freed": 0}
    return dict(sorted(stats.items()))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Return the statistics as text, one per line, in bytes."""
    return "\n".join(f"{name:40}{value:>20,}" for name, value in memory_stats(device).items() if value)


def empty_cache() -> None:
    """Free unreferenced tensors on the executor now. The client has no memory cache."""
    if port.is_open():
        current().flush()


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Return the properties of the physical device. Starts the session. Asks the executor once for each device."""
    index = index_of(device)
    port.sink.open()
    session, info = port.describe(index)
    properties = device_state.properties
    if (session, index) not in properties:
        memory = figures(device=index)
        for key in [key for key in properties if key[0] != session]:
            del properties[key]
        properties[session, index] = DeviceProperties(
            name=info.name or info.id,
            kind=info.kind,
            total_memory=info.memory or memory.get("device_total", 0),
            multi_processor_count=memory.get("multi_processor_count", 0),
            major=memory.get("major", 0),
            minor=memory.get("minor", 0),
        )
    return properties[session, index]


def get_device_name(device: Any = None) -> str:
    """Return the name of the physical device."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability (major, minor); (0, 0) if the device is not a GPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def _device_count() -> int:
    return port.device_count()


@for_users
def _check_index(index: int) -> None:
    existing_index(logical_device(index))


def _memory(what: str, index: int) -> list[int]:
    match what:
        case "stats":
            stats = memory_stats(index)
            return [
                stats[f"{name}_bytes.all.{when}"] for name in ("allocated", "reserved") for when in ("current", "peak")
            ]
        case "info":
            return list(mem_get_info(index))
        case "empty_cache":
            empty_cache()
        case "reset_peak":
            reset_peak_memory_stats(index)
        case "reset_accumulated":
            reset_accumulated_memory_stats(index)
    return []


def register() -> None:
    """Register the functions that C++ calls."""
    implement(device_count=_device_count, check_index=_check_index, memory=_memory)
