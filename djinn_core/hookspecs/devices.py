"""`djinn_register_devices`: the devices that executor processes compute on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from djinn_core.hookspecs import hookspec

if TYPE_CHECKING:
    from djinn_core.ir.costs import DeviceCapabilities


class DeviceRuntime:
    """One opened device of an executor process. Works as it is for any accelerator that PyTorch has; override the rest.

    Sessions call it from their own threads, one at a time. An exception fails the submission that needed the call.

    Attributes:
        device: the `torch.device` that ops run on.
        keeps_time: True if `take_seconds` says how long programs take, because the device only simulates them. Such an
            executor runs programs neither ahead nor in batches. False: the executor measures the time.
    """

    device: torch.device
    keeps_time: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` in device memory. Ops that are issued later see the bytes.

        `data` is a CPU tensor of bytes without other references, so a device in host memory may return it.
        """
        return data.to(self.device)

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in host memory, complete when this returns."""
        return tensor.cpu()

    def synchronize(self) -> None:
        """Wait until all ops have run. Raise the error of an op that failed."""
        if self.device.type != "cpu":  # ops on the CPU have run when their calls return
            torch.accelerator.synchronize(self.device)

    def generator(self) -> torch.Generator:
        """Return a new random generator on the device."""
        return torch.Generator(device=self.device)

    def memory(self) -> Mapping[str, int]:
        """Return bytes by name: at least `total`, `free`, and `allocated` by this process.

        The default asks PyTorch about an accelerator. A device in host memory overrides it.
        """
        free, total = torch.accelerator.get_memory_info(self.device)
        return {"total": total, "free": free, "allocated": torch.accelerator.memory_allocated(self.device)}

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which a program runs, if the device `keeps_time` and the executor has no memory limit."""
        return nullcontext()

    def take_seconds(self) -> float:
        """Return the device time of programs since the last call. Replies to clients report it if the device `keeps_time`."""
        return 0.0


class Device(ABC):
    """A kind of device, such as the GPUs of a machine.

    A gateway calls `discover` to know what its machine has. An executor process calls `discover` and `open` once, when it
    starts. An exception ends the start of the executor.

    Attributes:
        name: the part before the colon in `--device cuda:0`; unique among devices.
    """

    name: str

    @abstractmethod
    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return the devices of this kind on this machine, none if there are none. Their `id`s are `cuda:0`, `cuda:1`, ..."""

    @abstractmethod
    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process.

        Raises:
            StartupError: there is no such device, or it does not work.
        """


@hookspec
def djinn_register_devices(settings: Any) -> Iterable[Device]:
    """Return the devices that this plugin offers.

    Called once in each gateway and executor process. Executors never register `remote_accelerator`. An exception
    disables the plugin.
    """
    del settings
    raise NotImplementedError
