"""The library djinn-native. Its functions are the ops in `torch.ops.djinn`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.torch_dispatch import boxed_function, never_compiled, rename_backend, without_torch_dispatch
from djinn_client.tracebacks import shorten
from djinn_core.errors import StartupError


def load() -> None:
    """Load the library. Only a process that registers the device may do so; a server never does.

    Raises:
        StartupError: the library is not installed, or was built for another PyTorch.
    """
    try:
        import djinn_native
    except ModuleNotFoundError as error:
        raise StartupError(
            "the package djinn-native, which is the remote device of clients, is not installed: run "
            "`pip install --no-deps --no-build-isolation ./djinn_native` in a checkout of Djinn, or install its wheel from the folder of the release"
        ) from error
    rename_backend(DEVICE_NAME)
    try:
        ops.begin(djinn_native.load())
    except djinn_native.NativeLibraryError as error:
        raise StartupError(str(error)) from error


class _Functions:
    """The library's functions by name: those of `torch.ops.djinn`, without PyTorch's frames around an op, and plain functions."""

    def begin(self, library: Any) -> None:
        """Use the library's plain functions.

        `take(program, count)` and `look(program, first)` return the bytes that `RecordedProgram` reads.
        """
        for name in ("take", "look"):
            function = library[f"djinn_{name}"]
            function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_void_p
            setattr(self, name, functools.partial(_entries, function))

    def __getattr__(self, name: str) -> Any:
        function = boxed_function("djinn", name)
        setattr(self, name, function)
        return function


def _entries(function: Callable[[int, int], int | None], program: int, number: int) -> bytes:
    if (address := function(program, number)) is None:
        raise RuntimeError(f"the client has no recorded program {program}")
    return ctypes.string_at(address, int.from_bytes(ctypes.string_at(address, 8), "little"))


ops: Final[Any] = _Functions()
_implementations: Final[dict[int, Callable[..., Any]]] = {}  # by the id of the op


class CalledFromCpp(TorchDispatchMode):
    """A dispatch mode that C++ calls directly, without PyTorch's dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # equivalent to `never_compiled`, without importing the compiler


class _Implementations(CalledFromCpp):
    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return _implementations[id(func)](*args, **(kwargs or {}))
        except BaseException as error:
            shorten(error)
            raise


class _Kernel(CalledFromCpp):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._function(*args, **(kwargs or {}))
        except BaseException as error:
            shorten(error)
            raise


def implement(**functions: Callable[..., Any]) -> None:
    """Implement functions that C++ calls, by name."""
    if not _implementations:
        with _Implementations(), without_torch_dispatch():  # type: ignore[no-untyped-call]
            ops.set_functions()
    for name, function in functions.items():
        _implementations[id(getattr(torch.ops.djinn, name).default)] = function


def set_kernel(name: str, function: Callable[..., Any], key: str, *, partly: bool = False) -> None:
    """Make `function` the kernel of the op `name`, such as `aten::add.Tensor`, at a dispatch key.

    `partly`: True if PyTorch's kernel still handles calls that have no remote tensor and do not name the device.
    """
    packet, _, overload = name.partition(".")
    with _Kernel(function), without_torch_dispatch():
        ops.set_kernel(packet, overload, key, partly)


def send_upcalls_to(mode: TorchDispatchMode) -> None:
    """Make C++ call `mode.__torch_dispatch__` for each op that Python handles."""
    with mode, without_torch_dispatch():
        ops.set_upcall()


@functools.cache
def dtype_number(dtype: torch.dtype) -> int:
    """Return the number by which C++ knows a dtype."""
    return int(ops.dtype_number(dtype))


@functools.cache
def dtype_of(number: int) -> torch.dtype:
    """Return the dtype that C++ knows by this number."""
    dtype = next((d for d in [*vars(torch).values()] if isinstance(d, torch.dtype) and dtype_number(d) == number), None)
    assert dtype is not None
    return dtype
