"""Simulated devices, described by a cluster file: they predict times instead of computing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from djinn.hooks import Observer, hookimpl
from djinn_simulated.device import SimulatedDevice
from djinn_simulated.telling import SimulatedTimeReporter

if TYPE_CHECKING:
    from djinn.hooks import Device

djinn_api_version = "2.0"


@attrs.frozen
class Settings:
    """Settings of the plugin.

    Attributes:
        cluster: the file that describes the devices, as in docs/planning.md. With None, there are no devices.
    """

    cluster: Path | None = None


djinn_settings = Settings


@hookimpl
def djinn_register_devices(settings: Settings) -> Iterable[Device]:
    """Return the device kind `simulated`, whose devices `simulated:0` and so on the cluster file describes."""
    return [SimulatedDevice(settings.cluster)]


@hookimpl
def djinn_register_observers() -> Iterable[Observer]:
    """Return the observer that reports the simulated time at the end of a session."""
    return [SimulatedTimeReporter()]
