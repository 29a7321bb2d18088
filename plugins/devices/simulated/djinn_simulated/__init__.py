"""Devices that keep time instead of computing, as a cluster file describes them."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Device, Observer, hookimpl
from djinn_simulated.device import SimulatedDevice
from djinn_simulated.telling import Teller

djinn_api_version = 1


@hookimpl
def djinn_register_devices() -> Iterable[Device]:
    """The devices `simulated:0` and so on; none where no cluster is described."""
    return [SimulatedDevice()]


@hookimpl
def djinn_register_observers() -> Iterable[Observer]:
    """Who says, at the end of a session, what it would have taken."""
    return [Teller()]
