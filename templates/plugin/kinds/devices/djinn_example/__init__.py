"""A device for Djinn: the processors again, as a device of their own that counts the bytes that pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from djinn.hooks import Device, DeviceCapabilities, DeviceRuntime, StartupError, hookimpl

djinn_api_version = 1


class ExampleRuntime:
    """The device, opened for one executor process."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.bytes_received = 0
        self.bytes_delivered = 0

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """`data` on the device, ordered before the ops that follow."""
        self.bytes_received += data.nbytes
        return data.to(self.device)

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in host memory, complete when this returns."""
        self.bytes_delivered += tensor.nbytes
        return tensor.cpu()

    def synchronize(self) -> None:
        """Wait until everything that was issued has run."""

    def generator(self) -> torch.Generator:
        """A new random generator on the device."""
        return torch.Generator(device=self.device)

    def memory(self) -> Mapping[str, int]:
        """Bytes."""
        return {"total": _memory("SC_PHYS_PAGES"), "free": _memory("SC_AVPHYS_PAGES"), "allocated": 0}


class ExampleDevice:
    """Asked for with `djinn serve --device example:0`."""

    name = "example"

    def discover(self) -> Sequence[DeviceCapabilities]:
        """The devices of this kind on this machine."""
        total, free = _memory("SC_PHYS_PAGES"), _memory("SC_AVPHYS_PAGES")
        return (DeviceCapabilities("example:0", "example", "processors, counted", memory=total, memory_free=free),)

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process."""
        if index != 0:
            raise StartupError(f"there is no device example:{index}, only example:0")
        return ExampleRuntime()


def _memory(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


@hookimpl
def djinn_register_devices() -> list[Device]:
    """The devices that this plugin offers."""
    return [ExampleDevice()]
