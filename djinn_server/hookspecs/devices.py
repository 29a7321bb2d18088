"""`djinn_register_devices`: add kinds of devices that executor processes compute on."""

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
_COPIES_LOCK: Final = threading.Lock()
_DEVICE_ERROR: Final = re.compile(r"\b(CUDA|HIP|XPU|MPS|cuDNN|MIOpen) error|\b[A-Z]+_STATUS_[A-Z_]+")


class DeviceRuntime:
    """One opened device of an executor process.

    The defaults work for any accelerator of PyTorch. Override methods for other devices.

    Threads of sessions call the methods. An exception fails the submission that needed the call.

    Attributes:
        device: the `torch.device` that ops run on.
        keeps_time: True for a device that only simulates programs, so that `take_seconds` returns their durations. Its
            executor runs programs neither ahead of time nor in batches. False: the executor measures durations.
        hang_seconds: the executor ends if ops were issued and the device completes no submission for this time, or if
            issuing one op takes this time. The value must exceed the longest submission. `djinn serve --hang-seconds`
            sets it.
        opens_memory: True if `export` and `open` are implemented.
        ahead_seconds: the executor of an accelerator issues no further work while earlier work has been queued on the
            device for this time.
    """

    device: torch.device
    keeps_time: bool = False
    opens_memory: bool = False
    hang_seconds: float = 600.0
    ahead_seconds: float = 0.02
    _created_copies: DeviceCopies | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def _copies(self) -> DeviceCopies:
        with _COPIES_LOCK:
            if self._created_copies is None:
                self._created_copies = DeviceCopies(self.device)
            return self._created_copies

    def receive(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` in device memory. Ops that are issued later can read the bytes.

        `data` is a CPU tensor of bytes without other references. A device that computes in host memory may return `data`.
        """
        if self.device.type == "cpu":
            return data
        target = self.allocate(data.numel())
        self.write(target, 0, data)
        return self.commit(target)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for an upload that arrives in parts."""
        if self.device.type == "cpu":
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._copies.allocate(nbytes)

    def receive_buffer(self, nbytes: int) -> memoryview | None:
        """Return page-locked memory for bytes that `write` will copy. Return None if the bytes may be in any memory.

        The memory is reused once no view of it exists.
        """
        return None if self.device.type == "cpu" else self._copies.receive_buffer(nbytes)

    def write(self, target: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy bytes from the host to `target` at byte `start`, concurrently with running ops.

        The caller may change `data` afterwards, unless `data` is memory of a `receive_buffer`.
        """
        if target.device.type == "cpu":
            target[start : start + data.numel()] = data
        else:
            self._copies.write(target[start : start + data.numel()], data)

    def overwrite(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """Copy bytes from the host to device memory that ops may have used.

        Ops that are issued later see the new bytes.
        """
        if target.device.type == "cpu":
            target.copy_(data)
        else:
            self._copies.overwrite(target, data)

    def commit(self, target: torch.Tensor) -> torch.Tensor:
        """Return the complete upload as device memory, after its last part was written.

        Ops that are issued later see the bytes.
        """
        return self.receive(target) if target.device.type == "cpu" else self._copies.commit(target)

    def deliver(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor` in host memory. The copy is complete when this method returns.

        Subclasses override `start_delivery` instead.
        """
        return self.start_delivery(tensor)()

    def export(self, tensor: torch.Tensor) -> bytes | None:
        """Return a description with which another executor of this host can copy the tensor by `open`.

        Return None to let the executor send the bytes. `tensor` is one-dimensional and contiguous. A description is valid for one `open` by a process of this user, while `tensor` exists. Hold a reference
        to `tensor` only while a process copies it. The client may see descriptions.
        """
        del tensor
        return None

    def open(self, description: bytes) -> torch.Tensor:
        """Return a copy, on this device, of the bytes that another executor exported. The copy is complete.

        A client may have forged `description`. After an exception, the other executor sends the bytes instead.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot open memory of other executors")

    def start_delivery(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy of `tensor` to host memory. Return a function that waits for the copy and returns it.

        A session calls the function once, while other sessions issue ops. The function does not wait for these ops.
        """
        if tensor.device.type != "cpu":
            return self._copies.start_delivery(tensor)
        host_copy = tensor.cpu()
        return lambda: host_copy

    def synchronize(self) -> None:
        """Wait until all ops have run. Raise the error of an op that failed."""
        if self.device.type != "cpu":  # ops on the CPU have run when their calls return
            torch.accelerator.synchronize(self.device)

    def mark(self, *, timing: bool = False) -> Any:
        """Return a `torch.Event` that the device reaches when all ops issued so far have run."""
        event = torch.Event(self.device, enable_timing=timing)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def waits_since(self) -> float:
        """Return the time (`time.monotonic`) at which the longest wait for a copy began.

        Return infinity if no thread waits. The executor uses this to detect copies that hang.
        """
        return math.inf if self._created_copies is None else self._created_copies.waits.since()

    def relieve(self) -> None:
        """Free memory that no tensor uses. Called after an op ran out of memory, before the op is retried."""
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            with torch.accelerator.device_index(self.device.index):
                getattr(module, "empty_cache", torch.accelerator.empty_cache)()

    def is_lost(self, error: BaseException) -> bool:
        """Return True if `error` came from the device and no op can run on the device any more in this process.

        An accelerator raises such an error again at each call. So after an error of the device, the default synchronizes
        with the device to see whether it raises.
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
        """Return memory figures in bytes by name: at least `total`, `free`, and `allocated` by this process.

        The default queries PyTorch's accelerator, and adds `reserved` and `peak`. Override it for host memory.
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
        """Return the context in which a program runs. Used if the device `keeps_time` and there is no memory limit."""
        return nullcontext()

    def take_seconds(self) -> float:
        """Return the device time of programs since the last call, for devices that `keeps_time`."""
        return 0.0


class Device(ABC):
    """Describe and open one kind of device, such as the GPUs of a machine.

    The defaults work for any accelerator of PyTorch. Override methods for other devices.

    A gateway calls `discover` to know what its machine has. An executor process calls `select`, `discover` and `open`
    once, when it starts. After an exception the executor does not start. Exception: if `discover`
    raises and `--device` names no device, there are no devices of this kind.

    Attributes:
        name: the part before the colon in `--device cuda:0`, unique among kinds of devices. The defaults use it as
            PyTorch's name of the accelerator.
        chosen_by_name: True if executors use such a device only if `--device` names it.
    """

    name: str
    chosen_by_name: bool = False

    def select(self, index: int) -> int:
        """Hide the other devices of this kind from this process. Return the device's index among the visible devices.

        A process with one visible device computes on it in every thread. The default hides nothing.
        """
        return index

    def discover(self) -> Sequence[DeviceCapabilities]:
        """Return the devices of this kind on this machine. Their `id`s are `cuda:0`, `cuda:1` and so on."""
        return tuple([self.describe(index) for index in range(self.count())])

    def count(self) -> int:
        """Return the number of devices that this process can use."""
        module = torch.get_device_module(self.name)
        return int(module.device_count()) if module.is_available() else 0

    def describe(self, index: int) -> DeviceCapabilities:
        """Return facts about a device that are known before it is opened."""
        from djinn_core.ir.costs import DeviceCapabilities

        device = torch.device(self.name, index)
        free, total = torch.accelerator.get_memory_info(device)
        backend = torch.get_device_module(self.name)
        name_of = getattr(backend, "get_device_name", None)  # MPS has no names
        title = str(name_of(device)) if name_of is not None else self.name
        return DeviceCapabilities(f"{self.name}:{index}", self.name, title, memory=total, memory_free=free)

    def sensors(self, index: int) -> Mapping[str, float]:
        """Return `utilization` (0 to 1) and `temperature` (degrees Celsius) of an open device, as far as they are known.

        Called once a second while a dashboard is open, so it must be fast.
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
            usable = f"{self.name}:0 to {self.name}:{count - 1}" if count else "none"
            raise StartupError(f"this process cannot use a device {self.name}:{index}; it may use {usable}")
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
