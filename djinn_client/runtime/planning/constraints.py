"""Constraints of plans for several executors: the default placement policy, and memory and latency limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.placement_policies import PlacementPolicy
from djinn_core.ir.costs import DeviceCapabilities, NetworkTopology
from djinn_core.planning.request import preferred
from djinn_core.settings import Settings

SINGLE = "single"


def policy_for(settings: Settings, offered: Sequence[PlacementPolicy], devices: int) -> str:
    """Return the name of the placement policy: the configured policy, or else the preferred policy for this number of devices."""
    if settings.placement_policy:
        return settings.placement_policy
    return preferred(offered, SINGLE) if devices > 1 else SINGLE


@attrs.frozen
class MemoryInUse:
    """Bytes of this client on a device.

    Attributes:
        all_bytes: bytes of all values of the client on the device.
        unused_by_program: bytes of those values that the program does not use.
    """

    all_bytes: int = 0
    unused_by_program: int = 0


NOTHING = MemoryInUse()
NOT_OCCUPIED: Mapping[str, MemoryInUse] = {}


def limits_of(settings: Settings, devices: Sequence[str]) -> dict[str, int]:
    """Return the memory limits for plans from the setting `memory_limits`, in bytes by device id.

    Raises:
        ConfigurationError: a limit names an unknown device.
    """
    limits: dict[str, int] = {}
    for name, size in settings.memory_limits:
        matching = [d for n, d in enumerate(devices) if name in {"", str(n), d, d.partition("/")[2]}]
        if not matching:
            raise ConfigurationError(
                f"the setting memory_limits names the device {name!r}, which is not available. Use one of {', '.join(devices)}, "
                f"or a number from 0 to {len(devices) - 1}"
            )
        limits |= {device: min(size, limits.get(device, size)) for device in matching}
    return limits


def within(
    topology: NetworkTopology, limits: Mapping[str, int], occupied: Mapping[str, MemoryInUse]
) -> tuple[NetworkTopology, dict[str, int]]:
    """Return the devices with the memory that a program can use, and `limits` reduced by values that it does not use.

    Args:
        topology: the devices.
        limits: memory limits in bytes, by device id.
        occupied: memory that the client already uses, by device id.
    """
    devices = tuple(_limit_device(d, limits.get(d.id, 0), occupied.get(d.id, NOTHING)) for d in topology.devices)
    remaining = {
        device: max(1, limit - occupied.get(device, NOTHING).unused_by_program) for device, limit in limits.items()
    }
    return (topology if devices == topology.devices else attrs.evolve(topology, devices=devices)), remaining


def _limit_device(device: DeviceCapabilities, limit: int, usage: MemoryInUse) -> DeviceCapabilities:
    memory = min(device.memory, limit) if device.memory and limit else device.memory or limit
    bounds = [bytes_ for bytes_ in (device.memory_free, limit or None) if bytes_ is not None]
    free = min(bounds, default=None)
    if not usage.all_bytes and (memory, free) == (device.memory, device.memory_free):
        return device
    return attrs.evolve(
        device,
        memory=max(1, memory - usage.unused_by_program) if memory else 0,  # 0 means unknown
        memory_free=None if free is None else max(0, free - usage.all_bytes),
    )
