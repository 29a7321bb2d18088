"""Non-blocking copies to the CPU: `tensor.to("cpu", non_blocking=True)` and copies into pinned memory.

On CUDA such a copy may be read only after the next synchronization; an earlier read gets the previous content of the
memory. On this device, the CPU tensor waits when a PyTorch function first uses it. Native code that uses its address
without a PyTorch function must synchronize, as on CUDA. Code that uses other tensors over the same pinned memory must
also synchronize.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from djinn_client.interception import sync
from djinn_client.interception.async_fetch import Pending, fetch_later
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.torch_dispatch import no_torch_functions, without_modes
from djinn_client.tracebacks import for_users, shorten_through
from djinn_core.errors import DjinnError

_METADATA = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "is_cuda", "requires_grad")
        ),
        *(
            getattr(torch.Tensor, name)
            for name in ("size", "dim", "numel", "stride", "element_size", "is_floating_point")
        ),
    }
)


class ArrivingTensor(torch.Tensor):
    """A CPU tensor whose elements may not have arrived yet. It becomes a plain tensor when they arrive."""

    arrival: _Arrival

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if func not in _METADATA:
                for arrival in _arrivals_in((args, kwargs)):
                    arrival.wait()
            with no_torch_functions():
                return func(*args, **(kwargs or {}))
        except BaseException as error:
            shorten_through(error)
            raise


class _Arrival:
    """A pending copy into a tensor.

    Attributes:
        user_tensor: the tensor if the user owns its memory, so that it is filled even without other references.
    """

    def __init__(
        self, pending: Pending, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        self._pending = pending
        self._fill = fill
        self._tensor = weakref.ref(tensor)
        self.user_tensor: torch.Tensor | None = None
        self._landed = False

    @for_users
    def wait(self) -> None:
        """Wait until the elements are in the tensor. Raise the copy's error if it failed."""
        with device_state.copy_lock:
            tensor = self._tensor()
            if self._landed or tensor is None:
                return
            (elements,) = self._pending.result()
            with torch.no_grad(), no_torch_functions():
                self._fill(tensor, elements)
            self._landed, self.user_tensor = True, None
            # Last, because from here on another thread reads the tensor without a wait.
            if type(tensor) is ArrivingTensor:
                tensor.__class__ = torch.Tensor  # type: ignore[assignment]
                vars(tensor).pop("arrival", None)

    def done(self) -> bool:
        """Return True if the elements have arrived or the copy was dropped. Never blocks."""
        return self._landed or self._tensor() is None or self._pending.done()

    def land(self, strict: bool) -> None:
        """Write the copied elements into the tensor.

        A failed copy into the user's memory raises its error if `strict` is True. Other tensors raise it when used.
        """
        try:
            self.wait()
        except DjinnError:
            if strict and self.user_tensor is not None:
                raise


def _arrivals_in(argument: Any) -> Iterator[_Arrival]:
    if isinstance(argument, ArrivingTensor):
        if (arrival := vars(argument).get("arrival")) is not None:  # None: another thread has just landed it
            yield arrival
    elif isinstance(argument, dict):
        yield from _arrivals_in(tuple(argument.values()))
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _arrivals_in(part)


@without_modes
def copy_later(source: LazyTensor, memory_format: torch.memory_format) -> torch.Tensor | None:
    """Return a CPU tensor to which `source` is copied without blocking.

    Return None while a module is converted, because the module needs the elements now.
    """
    if device_state.thread.converts_module:
        return None
    layout = sync.meta_like(source)
    like = torch.empty_like(layout, memory_format=memory_format)
    plain = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    arriving = plain.as_subclass(ArrivingTensor)

    def fill(tensor: torch.Tensor, elements: torch.Tensor) -> None:
        tensor.data = sync.laid_out(elements, layout, memory_format)

    _register(arriving, _Arrival(fetch_later([source]), arriving, fill))
    return arriving


@without_modes
def copy_into_later(target: torch.Tensor, source: LazyTensor) -> bool:
    """Begin to copy `source` into pinned memory. Return False for other memory, and while a module is converted."""
    if device_state.thread.converts_module or not _is_pinned(target):
        return False
    arrival = _Arrival(fetch_later([source]), target, _copy)
    arrival.user_tensor = target
    if type(target) is torch.Tensor:
        target.__class__ = ArrivingTensor
        _register(target, arrival)
    else:
        _register(None, arrival)
    return True


def _is_pinned(target: torch.Tensor) -> bool:
    with no_torch_functions():  # reading `shape` here would wait for an earlier copy
        return target.is_pinned()


def _copy(target: torch.Tensor, elements: torch.Tensor) -> None:
    target.copy_(elements)


def _register(tensor: Any, arrival: _Arrival) -> None:
    if tensor is not None:
        tensor.arrival = arrival
    device_state.pending_copies.append(arrival)
    device_state.land_copies()
