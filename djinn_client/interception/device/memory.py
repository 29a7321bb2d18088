"""Memory figures of the remote device, as the executor counts them: one round trip each.

`allocated` is what this session's tensors hold. Its peak is the most that was seen at the end of a submission, or what the
device's own allocator says where it keeps count (CUDA), which includes what ops needed in between. Nothing is cached for
this session beyond its tensors, so `reserved` is the same unless the device's allocator has more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djinn_client.interception.device.current_device import index_of
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.runtime_interface import port

_NOTHING: Mapping[str, int] = {}


def figures(*, reset_peak: bool = False, device: int = 0) -> Mapping[str, int]:
    """Counts and bytes of a logical device for this session, when it has done what was recorded so far.

    The executor starts to count the peak again where `reset_peak` says so.
    """
    return current().figures(reset_peak=reset_peak, device=device)


def _present(device: Any, *, reset_peak: bool = False) -> Mapping[str, int]:
    """`figures` of a device; nothing where nothing has used it, so that asking starts no server."""
    index = index_of(device)
    used = port.is_open() or any(recorder.entries for recorder in recorders.all())
    return figures(reset_peak=reset_peak, device=index) if used else _NOTHING


def memory_allocated(device: Any = None) -> int:
    """Bytes that this session's tensors hold. Weights that the server is still reading are counted when they are there."""
    return _present(device).get("memory", 0)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that this session's tensors held since the beginning or `reset_peak_memory_stats`."""
    return _present(device).get("memory_peak", 0)


def memory_reserved(device: Any = None) -> int:
    """Bytes that the device's allocator holds for this session."""
    return _present(device).get("reserved", 0)


def max_memory_reserved(device: Any = None) -> int:
    """The most of `memory_reserved` that is known."""
    return _peak_reserved(_present(device))


def _peak_reserved(found: Mapping[str, int]) -> int:
    return max(found.get("reserved", 0), found.get("memory_peak", 0))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count the peak again from now on."""
    _present(device, reset_peak=True)


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Nothing: how often memory was allocated is not counted."""
    index_of(device)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes of the physical device that are free, and all that it has."""
    found = figures(device=index_of(device))
    return found.get("device_free", 0), found.get("device_total", 0)


def memory_stats(device: Any = None) -> dict[str, int]:
    """The figures under the names that `torch.cuda.memory_stats` has for them; what is not counted is 0."""
    found = _present(device)
    current_and_peak = {
        "allocated_bytes": (found.get("memory", 0), found.get("memory_peak", 0)),
        "active_bytes": (found.get("memory", 0), found.get("memory_peak", 0)),
        "reserved_bytes": (found.get("reserved", 0), _peak_reserved(found)),
    }
    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    for name, (now, peak) in current_and_peak.items():
        stats |= {f"{name}.all.current": now, f"{name}.all.peak": peak}
        stats |= {f"{name}.all.allocated": 0, f"{name}.all.freed": 0}
    return dict(sorted(stats.items()))


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures, one on a line, in bytes."""
    return "\n".join(f"{name:40}{value:>20,}" for name, value in memory_stats(device).items() if value)


def empty_cache() -> None:
    """Free unreferenced tensors on the executor now; it has no cache of its own."""
    if port.is_open():
        current().flush()
