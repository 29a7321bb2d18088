"""The device `fakegpu`, which behaves like a GPU, for tests of GPU code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from djinn.hooks import hookimpl
from djinn_fakegpu.device import FakeGpuDevice, Settings

if TYPE_CHECKING:
    from djinn.hooks import Device

__all__ = ["FakeGpuDevice", "Settings", "djinn_api_version", "djinn_register_devices", "djinn_settings"]

djinn_api_version = "2.0"
djinn_settings = Settings


@hookimpl
def djinn_register_devices(settings: Settings) -> Iterable[Device]:
    """Return the device kind `fakegpu`."""
    return [FakeGpuDevice(settings)]
