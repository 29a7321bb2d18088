"""Select, open and describe the device that an executor uses, and report its figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import torch

from djinn_core.errors import StartupError
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.logs import get_logger
from djinn_core.wire.messages import DeviceInfo
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.devices import Device, DeviceRuntime
from djinn_server.memory.limited import LimitedRuntime

FALLBACK = "cpu"
_log = get_logger("djinn.server")


@attrs.frozen
class OpenDevice:
    """A device that this process has opened. `sensors`: returns readings, such as `temperature`."""

    capabilities: DeviceCapabilities
    runtime: DeviceRuntime
    sensors: Callable[[], Mapping[str, float]] = dict

    def info(self) -> DeviceInfo:
        """Return the description of the device that clients receive, with its present memory in bytes."""
        memory, sensors = self.runtime.memory(), self.sensors()
        capabilities = self.capabilities
        return DeviceInfo(
            id=capabilities.id,
            kind=capabilities.kind,
            name=capabilities.name,
            memory=memory.get("total", capabilities.memory),
            memory_free=memory.get("free", capabilities.memory_free),
            spill=memory.get("spill", 0),
            pressure=memory.get("pressure", 0),
            threads=torch.get_num_threads() if capabilities.kind == FALLBACK else 0,
            torch=str(torch.__version__),
            flops=capabilities.flops,
            bandwidth=capabilities.bandwidth,
            dtypes=tuple(sorted(capabilities.dtypes)),
            unsupported=tuple(sorted(capabilities.unsupported)),
            utilization=sensors.get("utilization"),
            temperature=sensors.get("temperature"),
        )


def open_device(devices: Sequence[Device], name: str) -> OpenDevice:
    """Open a device by name, such as `cuda:0`, or `cuda` for the first of its kind.

    With an empty name, open the first device that is not a CPU, or else a CPU. `devices`: installed kinds of devices.

    Raises:
        StartupError: there is no such device, or it does not work. The message lists the available devices.
    """
    kind, _, index_text = (name or _best_kind(devices)).partition(":")
    device = next((d for d in devices if d.name == kind), None)
    if device is None or not (index_text or "0").isdigit():
        kinds = ", ".join(d.name for d in devices) or "none"
        raise StartupError(
            f"this machine has no device {name!r} (kinds of device: {kinds}). Other kinds come with plugins, such as those in "
            "plugins/cuda of the checkout; `djinn plugins` shows what is installed"
        )
    index = int(index_text or 0)
    visible = device.select(index) if name else index  # `_best_kind` has already tried all devices
    devices_of_kind = device.discover()
    if visible >= len(devices_of_kind):
        present = ", ".join(c.id for c in devices_of_kind) or f"no {kind} device"
        raise StartupError(
            f"this machine has no device {kind}:{index}; it has {present}. `--device cpu` uses its processors"
        )
    return OpenDevice(
        attrs.evolve(devices_of_kind[visible], id=f"{kind}:{index}"),
        device.open(visible),
        partial(device.sensors, visible),
    )


def with_eviction(
    device: OpenDevice,
    memory: int,
    disk: DiskQuota,
    *,
    on_demand: bool = False,
    idle: bool = False,
) -> OpenDevice:
    """Return the device with eviction of values, or `device` itself if no argument requires eviction.

    `memory`: limit in bytes for the values of sessions; 0: no limit. `on_demand`: without a limit, an accelerator
    evicts values if its memory runs out. `idle`: with `on_demand`, a CPU also evicts the values of idle sessions.
    """
    if not memory and not (on_demand and (idle or device.runtime.device.type != "cpu")):
        return device
    return attrs.evolve(device, runtime=LimitedRuntime(device.runtime, memory, disk))


def _best_kind(devices: Sequence[Device]) -> str:
    accelerators = (device for device in devices if device.name != FALLBACK and not device.chosen_by_name)
    return next((device.name for device in accelerators if _is_available(device)), FALLBACK)


def _is_available(device: Device) -> bool:
    try:
        return bool(device.discover())
    except Exception as error:
        _log.warning("cannot list the devices of a kind: they are not used", kind=device.name, error=repr(error))
        return False


def device_figures(runtime: DeviceRuntime) -> dict[str, int]:
    """Return memory figures in bytes, such as `device_total`, and the number of (multi)processors."""
    memory = {f"device_{name}": int(value) for name, value in runtime.memory().items()}
    if runtime.device.type == "cpu":
        return memory | {"multi_processor_count": os.cpu_count() or 1}
    properties = torch.get_device_module(runtime.device.type).get_device_properties(runtime.device)
    names = ("multi_processor_count", "major", "minor")
    return memory | {name: int(getattr(properties, name, 0)) for name in names}


def reset_device_peak(device: torch.device) -> None:
    """Reset the peak of allocated memory. Do nothing on a CPU, whose allocator records no peak."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
