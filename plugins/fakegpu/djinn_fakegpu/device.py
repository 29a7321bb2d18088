"""Discovery and opening of the device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from djinn.errors import StartupError
from djinn.hooks import Device
from djinn.planning import DeviceCapabilities

if TYPE_CHECKING:
    from djinn.hooks import DeviceRuntime


_LINUX: Final[bool] = sys.platform == "linux"


@attrs.frozen
class Settings:
    """The simulated hardware.

    Attributes:
        devices: number of devices of a process.
        memory_mib: memory of each device.
        pace: real seconds per simulated second; 0: waits take no time.
        control: folder for one socket per open device, through which `RemoteControl` injects faults; empty: no sockets.
    """

    devices: int = 2
    memory_mib: int = 16 << 10
    pace: float = 0.0
    control: str = ""


class FakeGpuDevice(Device):
    """The device kind `fakegpu`: devices in host memory that behave like GPUs, `fakegpu:0` and so on."""

    name = "fakegpu"
    chosen_by_name = True

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return the configured devices, or none on systems other than Linux."""
        memory = self._settings.memory_mib << 20
        return tuple(
            DeviceCapabilities(f"fakegpu:{index}", "fakegpu", "Fake GPU", memory=memory, memory_free=memory)
            for index in range(self._settings.devices if _LINUX else 0)
        )

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process. Compile the library if necessary.

        Raises:
            StartupError: the device does not exist, or there is no compiler.
        """
        if not 0 <= index < len(self.discover()):
            raise StartupError(
                f"there is no device fakegpu:{index}: the setting plugins.fakegpu.devices is {self._settings.devices}"
            )
        from djinn_fakegpu.runtime import FakeGpuRuntime

        settings = self._settings
        runtime = FakeGpuRuntime(
            index, {"devices": settings.devices, "memory": settings.memory_mib << 20, "pace": settings.pace}
        )
        if settings.control:
            from djinn_fakegpu.remote_control import listen

            listen(Path(settings.control) / f"{index}.sock")
        return runtime
