"""Properties of the device behind `remote_accelerator`: name, memory, processors, compute capability."""

from __future__ import annotations

from typing import Any

import attrs

from djinn_client.interception.device.current_device import index_of
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.device.memory import figures
from djinn_client.interception.runtime_interface import port


@attrs.frozen
class DeviceProperties:
    """As `torch.cuda.get_device_properties`; sizes in bytes.

    Attributes:
        kind: the executor's name for its device type, such as `cuda`.
        multi_processor_count: multiprocessors of a GPU, processors of a CPU.
        major, minor: compute capability, 0 if there is none.
    """

    name: str
    kind: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The properties of the physical device; starts the session, and asks once for each."""
    index = index_of(device)
    port.runtime()
    session, info = port.describe(index)
    known = device_state.properties
    if (session, index) not in known:
        found = figures(device=index)
        for key in [key for key in known if key[0] != session]:
            del known[key]
        known[session, index] = DeviceProperties(
            name=info.name or info.id,
            kind=info.kind,
            total_memory=info.memory or found.get("device_total", 0),
            multi_processor_count=found.get("multi_processor_count", 0),
            major=found.get("major", 0),
            minor=found.get("minor", 0),
        )
    return known[session, index]


def get_device_name(device: Any = None) -> str:
    """The name of the physical device."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Compute capability, major and minor; (0, 0) where the device is no GPU."""
    found = get_device_properties(device)
    return found.major, found.minor
