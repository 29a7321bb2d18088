"""The devices of a cluster file, one after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from djinn.hooks import DeviceCapabilities, DeviceRuntime, StartupError
from djinn.scheduling import read_cluster
from djinn_simulated.runtime import SimulatedRuntime

VARIABLE: Final = "DJINN_SIMULATED_CLUSTER"


class SimulatedDevice:
    """Devices that are described in the file that the environment variable `DJINN_SIMULATED_CLUSTER` names."""

    name = "simulated"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """All devices of the file, in its order; none where there is no file.

        Raises:
            ConfigurationError: the file describes no cluster.
            StartupError: the file cannot be read.
        """
        file = os.environ.get(VARIABLE, "")
        if not file:
            return ()
        try:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            raise StartupError(f"{VARIABLE} names {file}, which cannot be read: {error}") from error
        return tuple(
            attrs.evolve(device, id=f"simulated:{index}", kind="simulated", name=f"{device.name}, {device.id}")
            for index, device in enumerate(read_cluster(text, file).devices)
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
                f"there is no device simulated:{index}: {described} are described. Set {VARIABLE} to a cluster file; "
                "docs/scheduling.md has an example"
            )
        return SimulatedRuntime(found[index])
