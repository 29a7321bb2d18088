"""State of the device in this process, which PyTorch reaches without a context: one object for all that the device keeps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ReferenceType

if TYPE_CHECKING:
    import torch

    from djinn_client.interception.device.properties import DeviceProperties
    from djinn_client.interception.tensors.host_values import HostValue
    from djinn_client.interception.tensors.pending_copies import PendingCopy


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
        default_generators: the generators that ops use when they are given none, by index.
        seed: the last that was meant for all indexes, also for those that were not known then.
        properties: of the devices of the present session, by session and index.
        pending_copies: non-blocking copies to this machine, in the order in which they arrive.
        host_values: contents of storages that are known here, the oldest first, with their bytes; `host_bytes` in all.
    """

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.names = [DEVICE_NAME]
        self.handlers: dict[int, Handler] = {}
        self.default_generators: dict[int, torch.Generator] = {}
        self.seed: int | None = None
        self.properties: dict[tuple[str, int], DeviceProperties] = {}
        self.pending_copies: deque[PendingCopy] = deque()
        self.host_values: deque[tuple[ReferenceType[HostValue], int]] = deque()
        self.host_bytes = 0


device_state: Final = DeviceState()
