"""A device for Djinn: the CPU under another name, with 1 GiB of memory."""

from __future__ import annotations

import torch

from djinn.errors import StartupError
from djinn.hooks import Device, DeviceRuntime, hookimpl
from djinn.planning import DeviceCapabilities

djinn_api_version = "2.0"


class ExampleRuntime(DeviceRuntime):
    """The device, opened for one executor process. An accelerator of PyTorch needs no such class."""

    def memory(self) -> dict[str, int]:
        """Return bytes by name."""
        return {"total": 2**30, "free": 2**30, "allocated": 0}


class ExampleDevice(Device):
    """Used if `djinn serve --device example:0` names it."""

    name = "example"

    def discover(self) -> list[DeviceCapabilities]:
        """Return the devices of this kind on this machine."""
        return [DeviceCapabilities("example:0", "example", "a GiB of memory", memory=2**30, memory_free=2**30)]

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process."""
        if index != 0:
            raise StartupError(f"there is no device example:{index}, only example:0")
        return ExampleRuntime(torch.device("cpu"))


@hookimpl
def djinn_register_devices() -> list[Device]:
    """Return the devices of this plugin."""
    return [ExampleDevice()]
