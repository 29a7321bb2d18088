"""State of the device in this process: one object, because PyTorch calls the device without a context."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import attrs

from djinn_core.errors import StartupError
from djinn_core.system.processes import in_forked_child

if TYPE_CHECKING:
    import torch


@attrs.frozen
class DeviceProperties:
    """Properties of a device, with the names of `torch.cuda.get_device_properties`.

    Attributes:
        name: product name of the device, or else its id.
        kind: the executor's name for its device type, such as `cuda`.
        total_memory: size of the device's memory in bytes.
        multi_processor_count: number of multiprocessors of a GPU, or of processors of a CPU.
        major: major version of the compute capability. 0 if the device is no GPU.
        minor: minor version of the compute capability. 0 if the device is no GPU.
    """

    name: str
    kind: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int


class PendingCopy(Protocol):
    """A non-blocking copy to the CPU that has not arrived yet."""

    def done(self) -> bool:
        """True if the elements have arrived, or the copy was dropped. Does not block."""

    def land(self, strict: bool) -> None:
        """Write the copied elements into the CPU tensor.

        `strict`: True to raise an error of the copy, because the user might not see the error otherwise.
        """


class PredictedFetches(Protocol):
    """Prediction of the values that this thread will fetch next."""

    def take(self, key: int) -> torch.Tensor | None:
        """Return the elements of the value `key`, or None if it was not predicted or must be fetched by itself.

        The first call requests all predicted values.
        """

    def to_upload(self) -> list[torch.Tensor]:
        """Return the CPU tensors that will be uploaded next, in order. Later calls return an empty list."""

    def note_access(self, storage: Any) -> None:
        """Record that PyTorch accessed a remote storage, which may be fetched as a whole."""


DEVICE_NAME = "remote_accelerator"
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _not_installed(*_: Any) -> NoReturn:
    raise StartupError("remote_accelerator is not registered in this process: `import djinn` before using it")


class ThreadState(threading.local):
    """Settings of one thread, and the state of its calls in progress.

    Attributes:
        padding_is_last: True if the last padding mask that `left_aligned` saw has its padding at the end of each row.
        converts_module: True while a module is being moved or converted.
        predicted_fetches: prediction of the next fetches. None outside of a block of `expecting`.
        waits_until: deadline of this thread's waits for executors, in seconds of the monotonic clock. None: no limit.
    """

    padding_is_last = False
    converts_module = False
    predicted_fetches: PredictedFetches | None = None
    waits_until: float | None = None


class DeviceState:
    """State that lives as long as the process, because PyTorch cannot unregister a device.

    Attributes:
        thread: state of the current thread.
        names: device types that are remote; the last is the device type that the user's program uses.
        handlers: functions that handle an op instead of recording it, by the id of the op.
        repeated: ids of ops whose handler C++ calls only if the call is not cached.
        copy_later: begins a non-blocking copy to a new CPU tensor (source, memory format). Returns None if the copy
            must block.
        copy_into_later: begins a non-blocking copy to a CPU tensor (target, source). Returns False if the copy must
            block.
        wait_timeout: limit in seconds for each wait of each thread. 0: no limit.
        default_generators: the generators that ops use by default, by index.
        seed_lock: lock held while a default generator is created. Another thread must not draw from the generator before
            it is seeded.
        seed: the last seed for all indexes. Indexes that appear later start from it.
        properties: device properties of the current session, by session and index.
        pending_copies: non-blocking copies to this machine that have not arrived, in the order of their requests.
        copy_lock: lock held while the elements of a copy are written. Another thread that uses the tensor waits for it.
    """

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.names = [DEVICE_NAME]
        self.handlers: dict[int, Handler] = {}
        self.repeated: set[int] = set()
        self.copy_later: Callable[[Any, torch.memory_format], torch.Tensor | None] = _not_installed
        self.copy_into_later: Callable[[torch.Tensor, Any], bool] = _not_installed
        self.wait_timeout = 0.0
        self.default_generators: dict[int, torch.Generator] = {}
        self.seed_lock = threading.RLock()
        self.seed: int | None = None
        self.properties: dict[tuple[str, int], DeviceProperties] = {}
        self.pending_copies: deque[PendingCopy] = deque()
        self.copy_lock = threading.RLock()
        in_forked_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        self.copy_lock, self.seed_lock = (
            threading.RLock(),
            threading.RLock(),
        )  # threads of the parent may have held the locks

    def land_copies(self, strict: bool = False) -> None:
        """Fill the CPU tensors of all copies that have arrived. Sync points call this.

        Raises:
            RemoteError: `strict` is True, and a copy into the user's memory failed.
        """
        with self.copy_lock:
            while self.pending_copies and self.pending_copies[0].done():
                self.pending_copies.popleft().land(strict)


device_state: Final = DeviceState()
