"""The devices of a cluster file, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from djinn.errors import StartupError
from djinn.hooks import Device

# Clients ask for no device: what simulates one is imported where one is opened.
if TYPE_CHECKING:
    from djinn.hooks import DeviceRuntime
    from djinn.planning import DeviceCapabilities

SETTING: Final = "plugins.simulated.cluster"


class SimulatedDevice(Device):
    """Devices that are described in a file, the setting `plugins.simulated.cluster`."""

    name = "simulated"

    def __init__(self, cluster: Path | None = None) -> None:
        """`cluster`: the file; None: there are no devices."""
        self._cluster = cluster

    def discover(self) -> Sequence[DeviceCapabilities]:
        """All devices of the file, in its order; none where there is no file.

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
        """One of them, for this process.

        Raises:
            StartupError: there is no such device.
        """
        found = self.discover()
        if index >= len(found):
            described = f"{len(found)} devices" if found else "no devices"
            raise StartupError(
                f"there is no device simulated:{index}: {described} are described. Set {SETTING} to a cluster file, as in "
                "DJINN_PLUGIN_SIMULATED_CLUSTER=cluster.toml; docs/planning.md has an example"
            )
        from djinn_simulated.runtime import SimulatedRuntime

        return SimulatedRuntime(found[index])
