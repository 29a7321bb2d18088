"""State of the device in this process, which PyTorch reaches without a context: one object for all that the device keeps."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ReferenceType, WeakValueDictionary

if TYPE_CHECKING:
    import torch

    from djinn_core.interception.device.generators import BoundDefaultGenerator, DefaultGenerator
    from djinn_core.interception.device.properties import DeviceProperties
    from djinn_core.interception.device.streams import RemoteStream
    from djinn_core.interception.tensors.host_values import HostValue
    from djinn_core.interception.tensors.lazy_tensor import LazyTensor
    from djinn_core.interception.tensors.pending_copies import PendingCopy
    from djinn_core.interception.tensors.remote_storage import RemoteStorage
    from djinn_core.interception.tensors.storage import Value
    from djinn_core.torch_private import StorageReference


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
# Where addresses begin: no process has memory there, so no remote address is one of a CPU tensor.
_FIRST_ADDRESS: Final = 1 << 56


class KnownGenerator(Protocol):
    """A remote generator."""

    def operand(self) -> LazyTensor | None:
        """The value that holds its state; None for the state that ops use by default."""


class ThreadState(threading.local):
    """Choices of one thread, and the calls that it is in the middle of.

    Attributes:
        index: the index that the device without an index stands for. stream: the stream that was chosen; None: the default.
        keeps_random_state: PyTorch is saving a random state that it will not read.
        padding_is_last: the result of the last check whether padding comes last in each row.
        converts_module: a module is being moved or converted.
        remade_view: the view that the `as_strided` call under way makes again, and that has a value already.
        subclass: the class that `as_subclass` wants of the view under way.
        expected: the fetches that are expected next.
        waits_until: the end of its waits for executors, on the monotonic clock; None: no limit.
    """

    index = 0
    stream: RemoteStream | None = None
    keeps_random_state = False
    padding_is_last = False
    converts_module = False
    remade_view: LazyTensor | None = None
    subclass: type[LazyTensor] | None = None
    expected: ExpectedFetches | None = None
    waits_until: float | None = None


class DeviceState:
    """State that lives as long as the device is registered, which is as long as the process.

    Attributes:
        thread: the present thread's part.
        names: device types that are remote; the last is the one that the user's program uses.
        handlers: what handles an op in place of recording it, by the id of the op.
        libraries: registrations of kernels; in force as long as they are referenced.
        view_kernels: of these, the ones that bound the paths of views; None before a program needs them.
        generators: remote generators by C++ object, because PyTorch hands ops a new Python object for it.
        default_generators: the generators that ops use when they are given none, by index.
        seed: the last that was meant for all indexes, also for those that were not known then.
        default_streams: streams that are current where no other is, by index. stream_numbers: numbers of the other streams.
        properties: of the devices of the present session, by session and index.
        casts: autocast's copies of parameters, by the parameter's id, for as long as PyTorch keeps its own: until the outermost
            autocast block of any thread ends. The parameter is kept with its cast, so that no other object takes over its id.
        freed: values without references. Finalizers run at any moment, also while their own thread holds a lock, so they append
            here and do nothing else; `Recorder` frees what has gathered. It is the value itself that is kept, because a collection
            of cycles runs all finalizers before it takes anything apart: another one may use the value after its own has run, or
            even bring it back to life.
        pending_copies: non-blocking copies to this machine, in the order in which they arrive.
        pinned: storages that count as pinned, by the address of their bytes.
        host_values: contents of storages that are known here, the oldest first, with their bytes; `host_bytes` in all.
        storages: storage objects of remote tensors by number. next_address: the first address that was not given out.
    """

    def __init__(self) -> None:
        self.thread = ThreadState()
        self.names = [DEVICE_NAME]
        self.handlers: dict[int, Handler] = {}
        self.libraries: list[torch.library.Library] = []
        self.view_kernels: torch.library.Library | None = None
        self.generators: WeakValueDictionary[int, KnownGenerator] = WeakValueDictionary()
        self.default_generators: dict[int, DefaultGenerator | BoundDefaultGenerator] = {}
        self.seed: int | None = None
        self.default_streams: dict[int, RemoteStream] = {}
        self.stream_numbers = itertools.count(1)
        self.properties: dict[tuple[str, int], DeviceProperties] = {}
        self.casts: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}
        self.freed: deque[Value] = deque()
        self.pending_copies: deque[PendingCopy] = deque()
        self.pinned: dict[int, StorageReference] = {}
        self.host_values: deque[tuple[ReferenceType[HostValue], int]] = deque()
        self.host_bytes = 0
        self.storages: WeakValueDictionary[int, RemoteStorage] = WeakValueDictionary()
        self.next_address = _FIRST_ADDRESS


device_state: Final = DeviceState()
