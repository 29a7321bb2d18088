"""Devices: what an executor process computes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from djinn_core.hookspecs import hookspec

if TYPE_CHECKING:
    from djinn_core.ir.costs import DeviceCapabilities


@runtime_checkable
class DeviceRuntime(Protocol):
    """One opened device in an executor process."""

    device: torch.device

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """`data` (a CPU tensor of bytes without other references) on the device, ordered before the ops that follow."""

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in host memory, complete when this returns."""

    def synchronize(self) -> None:
        """Wait until everything that was issued has run; raises what it failed with."""

    def generator(self) -> torch.Generator:
        """A new random generator on the device."""

    def memory(self) -> Mapping[str, int]:
        """Bytes: at least `total`, `free` and `allocated` by this process."""


@runtime_checkable
class Timekeeper(Protocol):
    """Optional members of a runtime that itself says how long programs take, such as one that only simulates them."""

    def running(self) -> AbstractContextManager[None]:
        """The context in which programs run."""

    def take_seconds(self) -> float:
        """Device time of programs since the last call; replies to clients report it in place of wall-clock time."""


@runtime_checkable
class Device(Protocol):
    """A kind of device. `name` is what stands before the colon in `--device cuda:0`; unique among devices."""

    name: str

    def discover(self) -> Sequence[DeviceCapabilities]:
        """The devices of this kind on this machine; empty if there are none. `id` is `cuda:0` and so on."""

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process.

        Raises:
            StartupError: there is no such device, or it does not work.
        """


@hookspec
def djinn_register_devices(settings: Any) -> Iterable[Device]:
    """Return the devices that this plugin offers.

    Called once in each gateway and executor process. Executors never register `remote_accelerator`. An exception
    disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
