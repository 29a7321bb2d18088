"""The library djinn-native: its functions, which are ops `torch.ops.djinn`."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn_core.interception.device.device_state import DEVICE_NAME
from djinn_core.torch_backend import boxed_function, rename_backend, without_torch_dispatch


def load() -> None:
    """Load the library; only in a process that registers the device, which a server never does.

    Raises:
        NativeLibraryError: there is none that fits PyTorch.
    """
    import djinn_native

    rename_backend(DEVICE_NAME)
    djinn_native.load()


class _Functions:
    """`torch.ops.djinn` by name, without the frames that PyTorch puts around an op."""

    def __getattr__(self, name: str) -> Any:
        found = boxed_function("djinn", name)
        setattr(self, name, found)
        return found


ops: Final[Any] = _Functions()
_implementations: Final[list[torch.library.Library]] = []


def implement(**functions: Any) -> None:
    """Implement functions that C++ calls, by name."""
    if not _implementations:
        _implementations.append(torch.library.Library("djinn", "IMPL"))
    for name, function in functions.items():
        _implementations[0].impl(name, function, "CompositeExplicitAutograd")


def implement_differentiable(**functions: Any) -> None:
    """As `implement`: gradients are those of the ops that the functions call."""
    implement()
    for name, function in functions.items():
        _implementations[0].impl(name, function, "CompositeImplicitAutograd")


def send_upcalls_to(mode: TorchDispatchMode) -> None:
    """Have C++ call `mode.__torch_dispatch__` with each op that Python handles."""
    with mode, without_torch_dispatch():
        ops.set_upcall()


@functools.cache
def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype in C++."""
    return int(ops.dtype_number(dtype))


@functools.cache
def dtype_of(number: int) -> torch.dtype:
    """The dtype with a number of C++."""
    found = next((d for d in [*vars(torch).values()] if isinstance(d, torch.dtype) and dtype_number(d) == number), None)
    assert found is not None
    return found
