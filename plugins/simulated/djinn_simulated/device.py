"""Simulated devices, as a cluster file describes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from djinn.errors import StartupError
from djinn.hooks import Device

# Clients need no device: the simulation is imported when a device is opened.
if TYPE_CHECKING:
    from djinn.hooks import DeviceRuntime
    from djinn.planning import DeviceCapabilities

SETTING: Final = "plugins.simulated.cluster"


class SimulatedDevice(Device):
    """Devices described in the file of the setting `plugins.simulated.cluster`."""

    name = "simulated"

    def __init__(self, cluster: Path | None = None) -> None:
        """`cluster`: path of the cluster file. With None, there are no devices."""
        self._cluster = cluster

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return all devices of the file in its order, or () without a file.

        Raises:
            ConfigurationError: the file describes no cluster.
            StartupError: the file cannot be read.
        """
        if self._cluster is None:
            return ()
        from djinn.planning import read_cluster

        try:
            text = self._cluster.read_text(encoding="utf-8")
        except OSError as error:
            raise StartupError(f"the setting {SETTING} names {self._cluster}, which cannot be read: {error}") from error
        return tuple(
            attrs.evolve(device, id=f"simulated:{index}", kind="simulated", name=f"{device.name}, {device.id}")
            for index, device in enumerate(read_cluster(text, str(self._cluster)).devices)
        )

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process.

        Raises:
            StartupError: the device does not exist.
        """
        devices = self.discover()
        if index >= len(devices):
            description = f"{len(devices)} devices" if devices else "no devices"
            raise StartupError(
                f"there is no device simulated:{index}: the cluster file describes {description}. Set {SETTING} to a "
                "cluster file, as in DJINN_PLUGIN_SIMULATED_CLUSTER=cluster.toml; docs/planning.md has an example"
            )
        from djinn_simulated.runtime import SimulatedRuntime

        return SimulatedRuntime(devices[index])
