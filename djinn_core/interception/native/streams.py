"""Streams and events of the native device: those of PyTorch, whose marks Python records. See `device.streams` for what they mean."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from djinn_core.errors import UnsupportedOperation
from djinn_core.interception.device.current_device import index_of
from djinn_core.interception.native.library import implement
from djinn_core.interception.tensors.lazy_tensor import device_type, logical_device
from djinn_core.torch_backend import own_device_kind


class _EventMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class NativeEvent(torch.Event, metaclass=_EventMeta):
    """Makes events, which are marks in the program. PyTorch takes no subclass of `torch.Event` for one."""

    def __new__(  # type: ignore[misc]
        cls, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """As for the events of any accelerator."""
        if interprocess:
            _refuse()
        return torch.Event(logical_device(index_of(device)), enable_timing=enable_timing, blocking=blocking)

    @classmethod
    def from_ipc_handle(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused: other processes have sessions of their own."""
        _refuse()


def _refuse() -> NoReturn:
    raise UnsupportedOperation(f"events of {device_type()} cannot be shared with other processes")


def default_stream(device: Any = None) -> torch.Stream:
    """The stream that is current where no other is."""
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=own_device_kind())


def current_stream(device: Any = None) -> torch.Stream:
    """This thread's stream."""
    return torch.accelerator.current_stream(index_of(device))


def set_stream(stream: torch.Stream | None) -> None:
    """Make `stream` this thread's; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class NativeStreamContext:
    """A block in which a stream is this thread's; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def _mark(index: int) -> torch.Tensor:
    from djinn_core.interception.ops.own_calls import own_call
    from djinn_core.interception.recording.append import append
    from djinn_core.ir.operators import MARK

    return append(own_call(MARK, (), device=index), [], ())  # type: ignore[no-any-return]


def _has_passed(mark: torch.Tensor) -> bool:
    from djinn_core.interception.device.streams import _asked
    from djinn_core.interception.sync import fetch
    from djinn_core.ir.operators import HAS_PASSED

    return bool(fetch(_asked(HAS_PASSED, mark)).item())  # type: ignore[arg-type]


def _elapsed_time(begin: torch.Tensor, end: torch.Tensor) -> float:
    from djinn_core.interception.device.streams import _asked
    from djinn_core.interception.sync import fetch
    from djinn_core.ir.operators import ELAPSED_TIME

    if begin.device != end.device:
        raise ValueError(f"Both events must be of one device, and not {begin.device} and {end.device}.")
    return float(fetch(_asked(ELAPSED_TIME, begin, end)).item())  # type: ignore[arg-type]


def register() -> None:
    """Have C++ call these."""
    implement(mark=_mark, has_passed=_has_passed, elapsed_time=_elapsed_time)
