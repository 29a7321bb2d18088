"""State of the device in this process, which PyTorch reaches without a context: one object for all that the device keeps."""

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
    """As `torch.cuda.get_device_properties`; sizes in bytes.

    Attributes:
        kind: the executor's name for its device type, such as `cuda`.
        multi_processor_count: multiprocessors of a GPU, processors of a CPU.
        major, minor: compute capability, 0 if there is none.
    """

    name: str
    kind: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int


class PendingCopy(Protocol):
    """A non-blocking copy to this machine, on its way."""

    def done(self) -> bool:
        """True if the elements have arrived, or the copy was dropped. Does not block."""

    def land(self, strict: bool) -> None:
        """Put its elements in their place. `strict`: raise what it failed with, where its user may never see that."""


class ExpectedFetches(Protocol):
    """Knows which values this thread will fetch next."""

    def take(self, key: int) -> torch.Tensor | None:
        """The elements of the value `key`, where it was expected; asks for all that are, the first time."""

    def to_upload(self) -> list[torch.Tensor]:
        """CPU tensors that will be uploaded one after the other, where that is known; once, and none afterwards."""

    def saw(self, storage: Any) -> None:
        """A remote storage was looked at, and may be fetched whole."""


DEVICE_NAME = "remote_accelerator"
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _not_installed(*_: Any) -> NoReturn:
    raise StartupError("remote_accelerator is not registered in this process: `import djinn` before using it")


class ThreadState(threading.local):
    """Choices of one thread, and the calls that it is in the middle of.

    Attributes:
        padding_is_last: the result of the last check whether padding comes last in each row.
        converts_module: a module is being moved or converted.
        expected: the fetches that are expected next.
        waits_until: the end of its waits for executors, on the monotonic clock; None: no limit.
    """

    padding_is_last = False
    converts_module = False
    expected: ExpectedFetches | None = None
    waits_until: float | None = None


class DeviceState:
    """State that lives as long as the device is registered, which is as long as the process.

    Attributes:
        thread: the present thread's part.
        names: device types that are remote; the last is the one that the user's program uses.
        handlers: what handles an op in place of recording it, by the id of the op.
        repeated: ids of ops with a handler that C++ needs for unknown calls only.
        copy_later: begin a copy to a new CPU tensor (source, memory format); None if it must wait.
        copy_into_later: begin a copy to a CPU tensor (target, source); false where it must wait.
        wait_timeout: seconds that any single wait of any thread may take; 0: as long as it takes.
        default_generators: the generators that ops use when they are given none, by index.
        seeding: held while a default generator begins. Another thread must not draw from it before it is seeded.
        seed: the last that was meant for all indexes, also for those that were not known then.
        properties: of the devices of the present session, by session and index.
        pending_copies: non-blocking copies to this machine, in the order in which they arrive.
        landing: held while a copy lands. Another thread that uses the tensor waits for it.
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
        self.seeding = threading.RLock()
        self.seed: int | None = None
        self.properties: dict[tuple[str, int], DeviceProperties] = {}
        self.pending_copies: deque[PendingCopy] = deque()
        self.landing = threading.RLock()
        in_forked_child(self._begin_in_child)

    def _begin_in_child(self) -> None:
        self.landing, self.seeding = (
            threading.RLock(),
            threading.RLock(),
        )  # threads that stayed in the parent may have held them

    def land_copies(self, strict: bool = False) -> None:
        """Put in place the elements of all copies that have arrived, at a sync point. Replies come in order.

        Raises:
            RemoteError: with `strict`, the error of a copy into memory of the user's.
        """
        with self.landing:
            while self.pending_copies and self.pending_copies[0].done():
                self.pending_copies.popleft().land(strict)


device_state: Final = DeviceState()
