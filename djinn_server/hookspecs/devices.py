"""`djinn_register_devices`: the devices that executor processes compute on."""

from __future__ import annotations

import math
import re
import threading
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from djinn_core.hookspecs import hookspec
from djinn_server.system.device_copies import DeviceCopies

if TYPE_CHECKING:
    from djinn_core.ir.costs import DeviceCapabilities

# Accelerator libraries raise plain RuntimeErrors.
_OPENING: Final = threading.Lock()
_DEVICE_ERROR: Final = re.compile(r"\b(CUDA|HIP|XPU|MPS|cuDNN|MIOpen) error|\b[A-Z]+_STATUS_[A-Z_]+")


class DeviceRuntime:
    """One opened device of an executor process.

    The defaults work for any accelerator of PyTorch. Override methods for other devices.

    Sessions call it from their own threads. An exception fails the submission that needed the call.

    Attributes:
        device: the `torch.device` that ops run on.
        keeps_time: True if `take_seconds` says how long programs take, because the device only simulates them. Such an executor
            runs programs neither ahead nor in batches. False: the executor measures the time.
        hang_seconds: the executor ends if the device completes no submission for this time although ops of one were issued, or if
            issuing one op takes this time. It must exceed the longest submission; `--hang-seconds` of `djinn serve` sets it.
        opens_memory: True if `export` and `open` are implemented.
        ahead_seconds: an accelerator's executor issues no further turn while an earlier turn has been queued on the device for
            this time.
    """

    device: torch.device
    keeps_time: bool = False
    opens_memory: bool = False
    hang_seconds: float = 600.0
    ahead_seconds: float = 0.02
    _made: DeviceCopies | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def _copies(self) -> DeviceCopies:
        with _OPENING:
            if self._made is None:
                self._made = DeviceCopies(self.device)
            return self._made

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` in device memory. Ops that are issued later see the bytes.

        `data` is a CPU tensor of bytes without other references, so a device in host memory may return it.
        """
        if self.device.type == "cpu":
            return data
        target = self.allocate(data.numel())
        self.write(target, 0, data)
        return self.commit(target)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for an upload that arrives in parts. A device in host memory allocates there."""
        if self.device.type == "cpu":
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._copies.allocate(nbytes)

    def receive_buffer(self, nbytes: int) -> memoryview | None:
        """Return page-locked memory to receive bytes into that `write` copies next. None: receive them anywhere.

        The memory is used again when no view of it is left.
        """
        return None if self.device.type == "cpu" else self._copies.receive_buffer(nbytes)

    def write(self, target: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy bytes of the host to `target` at `start`, beside the ops that run.

        `data` may change when this returns, except the memory of a `receive_buffer`.
        """
        if target.device.type == "cpu":
            target[start : start + data.numel()] = data
        else:
            self._copies.write(target[start : start + data.numel()], data)

    def overwrite(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy bytes of the host to device memory that ops may have used. Ops that are issued later see the bytes."""
        if target.device.type == "cpu":
            target.copy_(data)
        else:
            self._copies.overwrite(target, data)

    def commit(self, target: torch.Tensor) -> torch.Tensor:
        """Return an upload in device memory after its last part. Ops that are issued later see the bytes."""
        return self.receive(target) if target.device.type == "cpu" else self._copies.commit(target)

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` in host memory, complete when this returns. A subclass overrides `start_delivery` instead."""
        return self.start_delivery(tensor)()

    def export(self, tensor: torch.Tensor) -> bytes | None:
        """Describe device memory that another executor of this host may copy with `open`. None: its bytes are sent instead.

        `tensor` is one-dimensional, without gaps, and complete when this returns. The description is valid for one `open`, only
        for processes of this user, and only while `tensor` exists: hold no reference to `tensor` except while a process copies it.
        The client may see descriptions.
        """
        del tensor
        return None

    def open(self, description: bytes) -> torch.Tensor:
        """Return a copy on this device of memory that another executor exported, as bytes. Complete when this returns.

        Any client may have forged `description`. An exception has the bytes sent instead.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot open memory of other executors")

    def start_delivery(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Issue a copy of `tensor` to host memory, and return a function that waits for the copy and returns it.

        Sessions call that function, once, while other sessions issue ops. It does not wait for these.
        """
        if tensor.device.type != "cpu":
            return self._copies.start_delivery(tensor)
        here = tensor.cpu()
        return lambda: here

    def synchronize(self) -> None:
        """Wait until all ops have run. Raise the error of an op that failed."""
        if self.device.type != "cpu":  # ops on the CPU have run when their calls return
            torch.accelerator.synchronize(self.device)

    def mark(self, *, timing: bool = False) -> Any:
        """Return a `torch.Event` of an accelerator that is reached when the ops issued so far have run."""
        event = torch.Event(self.device, enable_timing=timing)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def waits_since(self) -> float:
        """Return since when a thread waits for a copy (`time.monotonic`); infinite if no thread does. It finds copies that hang."""
        return math.inf if self._made is None else self._made.waits.since()

    def relieve(self) -> None:
        """Free memory that no tensor uses. Called after an op ran out of memory, before the op is tried once more."""
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            with torch.accelerator.device_index(self.device.index):
                getattr(module, "empty_cache", torch.accelerator.empty_cache)()

    def is_lost(self, error: BaseException) -> bool:
        """Return True if `error` came from the device and no op can run on it any more in this process.

        An accelerator repeats such an error at each call, so the default synchronizes after an error of the device.
        """
        if self.device.type == "cpu" or isinstance(error, torch.OutOfMemoryError):
            return False
        if not isinstance(error, torch.AcceleratorError) and not _DEVICE_ERROR.search(str(error)):
            return False
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def generator(self) -> torch.Generator:
        """Return a new random generator on the device."""
        return torch.Generator(device=self.device)

    def memory(self) -> Mapping[str, int]:
        """Return bytes by name: at least `total`, `free`, and `allocated` by this process.

        The default asks PyTorch about an accelerator, and adds `reserved` and `peak`. A device in host memory overrides it.
        """
        free, total = torch.accelerator.get_memory_info(self.device)
        return {
            "total": total,
            "free": free,
            "allocated": torch.accelerator.memory_allocated(self.device),
            "reserved": torch.accelerator.memory_reserved(self.device),
            "peak": torch.accelerator.max_memory_allocated(self.device),
        }

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which a program runs, if the device `keeps_time` and the executor has no memory limit."""
        return nullcontext()

    def take_seconds(self) -> float:
        """Return the device time of programs since the last call. Replies to clients report it if the device `keeps_time`."""
        return 0.0


class Device(ABC):
    """Describe and open one kind of device, such as the GPUs of a machine.

    The defaults work for any accelerator of PyTorch. Override methods for other devices.

    A gateway calls `discover` to know what its machine has. An executor process calls `select`, `discover` and `open`
    once, when it starts. An exception ends the start of the executor, unless `discover` raises it and `--device` names
    no
    device: then there are none of this kind.

    Attributes:
        name: the part before the colon in `--device cuda:0`; unique among devices. The defaults take it for PyTorch's
            name of the accelerator.
        chosen_by_name: True if executors take such a device only where `--device` names it.
    """

    name: str
    chosen_by_name: bool = False

    def select(self, index: int) -> int:
        """Hide the other devices of this kind from this process, and return the device's index among the visible ones.

        A process with one visible device computes on it in every thread. The default hides nothing.
        """
        return index

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return the devices of this kind on this machine, none if there are none. Their `id`s are `cuda:0`, `cuda:1`, ..."""
        return tuple([self.describe(index) for index in range(self.count())])

    def count(self) -> int:
        """Return the number of devices that this process can use."""
        module = torch.get_device_module(self.name)
        return int(module.device_count()) if module.is_available() else 0

    def describe(self, index: int) -> DeviceCapabilities:
        """Return what is known of a device before it is opened."""
        from djinn_core.ir.costs import DeviceCapabilities

        device = torch.device(self.name, index)
        free, total = torch.accelerator.get_memory_info(device)
        backend = torch.get_device_module(self.name)
        name_of = getattr(backend, "get_device_name", None)  # MPS has none
        title = str(name_of(device)) if name_of is not None else self.name
        return DeviceCapabilities(f"{self.name}:{index}", self.name, title, memory=total, memory_free=free)

    def sensors(self, index: int) -> Mapping[str, float]:
        """Return `utilization` (0 to 1) and `temperature` (degrees Celsius) of an open device, as far as they are known.

        Called once a second while somebody looks, so it must be fast.
        """
        del index
        return {}

    def open(self, index: int) -> DeviceRuntime:
        """Open a device for this process.

        Raises:
            StartupError: there is no such device, or it does not work.
        """
        from djinn_core.errors import StartupError

        count = self.count()
        if not 0 <= index < count:
            have = f"{self.name}:0 to {self.name}:{count - 1}" if count else "none"
            raise StartupError(f"there is no device {self.name}:{index}: this process may use {have}")
        runtime = DeviceRuntime(torch.device(self.name, index))
        try:
            runtime.receive(torch.zeros(1, dtype=torch.uint8))
            runtime.synchronize()
        except (RuntimeError, AssertionError, ValueError) as error:
            raise StartupError(f"{self.name}:{index} does not work: {error}") from error
        return runtime


@hookspec
def djinn_register_devices(settings: Any) -> Iterable[Device]:
    """Return the devices that this plugin offers.

    Called once in each gateway and executor process. Executors never register `remote_accelerator`. An exception
    disables the plugin.
    """
    del settings
    raise NotImplementedError
