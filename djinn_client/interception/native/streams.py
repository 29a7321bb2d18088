"""Streams and events of the remote device. They use PyTorch's classes; Python records the marks of events.

The device runs ops in program order. Every stream stands for that order, so streams need no synchronization for a
correct result. An event is a mark in the program: the executor notes the time at which it reaches the mark, and
`elapsed_time` is the difference of two such times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.device.indexes import index_of
from djinn_client.interception.native.library import implement, ops
from djinn_client.interception.recording.append import append, own_call
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, device_type, logical_device
from djinn_client.torch_dispatch import own_device_kind
from djinn_client.tracebacks import for_users
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import ELAPSED_TIME, HAS_PASSED, MARK


class _EventMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class NativeEvent(torch.Event, metaclass=_EventMeta):
    """Factory of events, which are marks in the program. It returns plain `torch.Event` objects, never a subclass."""

    def __new__(  # type: ignore[misc]
        cls, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """Create an event, with the arguments of any accelerator's event."""
        if interprocess:
            _refuse()
        return torch.Event(logical_device(index_of(device)), enable_timing=enable_timing, blocking=blocking)

    @classmethod
    def from_ipc_handle(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: other processes have their own sessions."""
        _refuse()


class NamedEvent(torch.Event):
    """An event that shows its device under another name.

    Two of its methods are in Python, because PyTorch's methods refuse that name.

    Attributes:
        timed: True if `elapsed_time` may be called.
    """

    timed: bool
    _index: int

    def __new__(  # noqa: D102
        cls, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Self:
        if interprocess:
            _refuse()
        index = index_of(device)
        named_event = super().__new__(cls, logical_device(index), enable_timing=enable_timing, blocking=blocking)
        named_event.timed, named_event._index = enable_timing, index
        return named_event

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the logical device. PyTorch knows the index once the event is recorded."""
        index: int | None = _device_of_event(self).index
        return logical_device(self._index if index is None else index)

    @for_users
    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds on the device from this mark to `end_event`. Waits for both events: one round trip.

        Raises:
            ValueError: one of the events was created without `enable_timing=True`, or was not recorded.
        """
        if not (self.timed and end_event.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return _elapsed_time(ops.mark_of_event(self.event_id), ops.mark_of_event(end_event.event_id))

    def ipc_handle(self) -> NoReturn:
        """Raise an error: other processes have their own sessions."""
        _refuse()

    @classmethod
    def from_ipc_handle(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: other processes have their own sessions."""
        _refuse()


class NamedStream(torch.Stream):
    """A stream that shows its device under another name."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Self:  # noqa: D102
        if "stream_id" in kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, logical_device(index_of(device)), priority=priority)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the logical device."""
        return logical_device(self.device_index)

    def record_event(self, event: Any = None) -> Any:
        """Record a mark in the program as `event`, or as a new event."""
        recorded_event = NamedEvent(self.device_index) if event is None else event
        recorded_event.record(self)
        return recorded_event


_device_of_event: Any = torch.Event.device.__get__


def install_named_streams() -> None:
    """Make the device module use `NamedStream` and `NamedEvent`, which can show another device name."""

    def named(find: Callable[..., torch.Stream]) -> Callable[..., NamedStream]:
        @functools.wraps(find)
        def stream(device: Any = None) -> NamedStream:
            stream_of_device = find(device)
            return NamedStream(
                stream_id=stream_of_device.stream_id,
                device_index=stream_of_device.device_index,
                device_type=stream_of_device.device_type,
            )

        return for_users(stream)

    module: Any = getattr(torch, DEVICE_NAME)
    module.Stream, module.Event = NamedStream, NamedEvent
    module.current_stream, module.default_stream = named(current_stream), named(default_stream)


def _refuse() -> NoReturn:
    raise UnsupportedOperation(f"events of {device_type()} cannot be shared with other processes")


def default_stream(device: Any = None) -> torch.Stream:
    """Return the default stream."""
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=own_device_kind())


def current_stream(device: Any = None) -> torch.Stream:
    """Return this thread's current stream."""
    return torch.accelerator.current_stream(index_of(device))


def set_stream(stream: torch.Stream | None) -> None:
    """Make `stream` current on this thread. None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class NativeStreamContext:
    """Context manager that makes the stream `stream` current on this thread. None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def _mark(index: int) -> torch.Tensor:
    return append(own_call(MARK, (), device=index), [], ())  # type: ignore[no-any-return]


def _query(op: str, *marks: LazyTensor) -> LazyTensor:
    metas = tuple(mark.remote.meta for mark in marks)
    return append(own_call(op, metas, device=metas[0].device), list(marks), ())  # type: ignore[no-any-return]


def _has_passed(mark: torch.Tensor) -> bool:
    return bool(fetch(_query(HAS_PASSED, mark)).item())  # type: ignore[arg-type]


def _elapsed_time(begin: torch.Tensor, end: torch.Tensor) -> float:
    if begin.device != end.device:
        raise ValueError(f"Both events must be of one device, and not {begin.device} and {end.device}.")
    return float(fetch(_query(ELAPSED_TIME, begin, end)).item())  # type: ignore[arg-type]


def register() -> None:
    """Register the functions that C++ calls."""
    implement(mark=_mark, has_passed=_has_passed, elapsed_time=_elapsed_time)
