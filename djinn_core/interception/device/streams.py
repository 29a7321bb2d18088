"""Streams and events of the remote device (the API of `torch.cuda.Stream` and `torch.cuda.Event`).

The device runs ops in one order: that of the program. Every stream stands for that order, so streams need no
synchronization for a correct result. An event is a mark in the program: the executor notes the time at which it reaches the
mark, and `elapsed_time` is the difference of two such times.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception import sync
from djinn_core.interception.device.current_device import index_of
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.dispatch import handles
from djinn_core.interception.ops.own_calls import own_call
from djinn_core.interception.recording.append import append
from djinn_core.interception.recording.recorder import current
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, device_type, is_remote, logical_device
from djinn_core.interception.tensors.substitute_classes import stand_in
from djinn_core.ir.operators import ELAPSED_TIME, HAS_PASSED, MARK
from djinn_core.torch_private import CEvent, CStream, is_own_type, own_stream
from djinn_core.tracebacks import for_users


class RemoteStream(CStream):
    """A stream of the remote device. All of them are the one order of the program."""

    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:  # noqa: D102
        number = kwargs.get("stream_id")
        made: Self = own_stream(cls, next(device_state.stream_numbers) if number is None else number, index_of(device))
        made.priority = priority
        return made

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.before: list[RemoteStream] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return logical_device(self.device_index)

    @for_users
    def synchronize(self) -> None:
        """Wait until everything that was recorded has run."""
        sync.synchronize()

    @for_users
    def query(self) -> bool:
        """True if everything that this thread has recorded has run; one round trip."""
        return bool(self.record_event().query())

    def record_event(self, event: Any = None) -> Any:
        """Put a mark into the program: `event`, or a new one."""
        made = RemoteEvent() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Any) -> None:
        """Order ops recorded from now on after the mark; see `RemoteEvent.wait`."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Nothing: all streams are one order, and what another thread has written is there when it is used."""

    def __enter__(self) -> Self:
        self.before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self.before.pop())


class RemoteEvent(CEvent):
    """A mark in the program. It is passed when the executor has run everything that was recorded before it.

    Attributes:
        timed: whether `elapsed_time` may be asked. mark: the mark's value, once it is recorded.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102
        return CEvent.__new__(cls, device=logical_device(0))

    def __init__(
        self, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess:
            self.ipc_handle()
        self._index = index_of(device)
        self.timed = enable_timing
        self.mark: LazyTensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return logical_device(self._index)

    @for_users
    def record(self, stream: Any = None) -> None:
        """Put the mark here; it moves when it is recorded again."""
        if isinstance(stream, RemoteStream):
            self._index = stream.device_index
        self.mark = append(own_call(MARK, (), device=self._index), [], ())

    @for_users
    def wait(self, stream: Any = None) -> None:
        """Order ops recorded from now on after the mark, also where another thread has recorded the mark."""
        if self.mark is not None:
            current().order_after(self.mark.remote.storage)

    @for_users
    def query(self) -> bool:
        """True if the executor has passed the mark, or the event was never recorded; one round trip."""
        return self.mark is None or bool(sync.fetch(_asked(HAS_PASSED, self.mark)).item())

    @for_users
    def synchronize(self) -> None:
        """Wait until the mark is passed; one round trip."""
        if self.mark is not None:
            sync.fetch(_asked(ELAPSED_TIME, self.mark, self.mark))

    @for_users
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device from this mark to the other; waits for both, one round trip.

        Raises:
            ValueError: one of them was made without `enable_timing=True`, was not recorded, or is of another device.
        """
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.mark is None or end_event.mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.device != end_event.device:
            raise ValueError(f"Both events must be of one device, and not {self.device} and {end_event.device}.")
        return float(sync.fetch(_asked(ELAPSED_TIME, self.mark, end_event.mark)).item())

    def ipc_handle(self) -> NoReturn:
        """Refused: other processes have sessions of their own."""
        raise UnsupportedOperation(f"events of {device_type()} cannot be shared with other processes")

    @classmethod
    def from_ipc_handle(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused: other processes have sessions of their own."""
        raise UnsupportedOperation(f"events of {device_type()} cannot be shared with other processes")


def _asked(op: str, *marks: LazyTensor) -> LazyTensor:
    """Record one of Djinn's own ops on marks, which are on one device; its result."""
    metas = tuple(mark.remote.meta for mark in marks)
    return append(own_call(op, metas, device=metas[0].device), list(marks), ())  # type: ignore[no-any-return]


def default_stream(device: Any = None) -> RemoteStream:
    """The stream that is current where no other is."""
    index = index_of(device)
    streams = device_state.default_streams
    if index not in streams:
        streams[index] = RemoteStream(device, stream_id=0)
    return streams[index]


def current_stream(device: Any = None) -> RemoteStream:
    """This thread's stream."""
    return device_state.thread.stream or default_stream(device)


def set_stream(stream: Any) -> None:
    """Make `stream` this thread's; None changes nothing."""
    if stream is not None:
        device_state.thread.stream = stream


class StreamContext:
    """A block in which a stream is this thread's; None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: RemoteStream | None = None

    def __enter__(self) -> None:
        self._before = current_stream()
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        set_stream(self._before)


@handles(torch.ops.aten.record_stream.default)
def record_stream(_func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """`tensor.record_stream(stream)`: the executor knows from the program how long memory is used."""


def _is_ours(device: Any) -> bool:
    """True if a stream or an event on `device` is remote; without a device it belongs to the accelerator."""
    return device is None or isinstance(device, int) or is_remote(torch.device(device))


def _make_stream(device: Any = None, priority: int = 0, **kwargs: Any) -> RemoteStream | None:
    if kwargs.get("device_type") is not None and not is_own_type(kwargs["device_type"]):
        return None
    return RemoteStream(device, priority, **kwargs) if _is_ours(device) else None


def _make_event(device: Any = None, *args: Any, **kwargs: Any) -> RemoteEvent | None:
    return RemoteEvent(device, *args, **kwargs) if _is_ours(device) else None


# What become `torch.Stream` and `torch.Event`.
Stream = stand_in(CStream, _make_stream)
Event = stand_in(CEvent, _make_event)
