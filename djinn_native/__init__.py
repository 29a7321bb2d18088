"""Djinn's device in C++. Clients load it with `load`. Servers never load it.

A process has one PrivateUse1 device. The library registers it, so no other library in the process can register its
own.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["NativeLibraryError", "load"]
__version__ = "26.12.0rc1"

_LIBRARIES: Final = Path(__file__).resolve().parent / "lib"
_PREFIX: Final = "djinn_torch_"
_FIELDS: Final = 16  # of `djinn_native_read_tensor`


class NativeLibraryError(ImportError):
    """The native library is missing, cannot be loaded, or was built for another PyTorch.

    The one-line message names the remedy.
    """


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library for this PyTorch, once, after a self-test. It registers the device and the ops `torch.ops.djinn`.

    Raises:
        NativeLibraryError: there is no library for this version of PyTorch, or it does not fit.
    """
    path = _library()
    try:
        library = ctypes.CDLL(str(path))  # resolves all symbols now, so that a missing symbol is an error here
    except OSError as error:
        raise _error(f"{path.name} cannot be loaded ({_one_line(error)})") from error
    if difference := _difference(library):
        raise _error(f"{path.name} does not fit: {difference}")
    torch.ops.load_library(str(path))
    return library


def _library() -> Path:
    """Return the file for the minor version of the loaded PyTorch."""
    wanted = _minor(torch.__version__)
    built = {path.stem.removeprefix(_PREFIX).replace("_", "."): path for path in _LIBRARIES.glob(f"{_PREFIX}*")}
    if wanted in built:
        return built[wanted]
    having = f"it has libraries for PyTorch {', '.join(sorted(built))} only" if built else "it has no library at all"
    raise _error(having)


def _difference(library: ctypes.CDLL) -> str:
    """Return the difference between the library and the loaded PyTorch or this package; empty if there is none."""
    try:
        library.djinn_native_abi.restype = library.djinn_native_difference.restype = ctypes.c_char_p
        compiled = dict(part.split("=", 1) for part in library.djinn_native_abi().decode().split(";"))
    except (AttributeError, ValueError):
        return "it has no self-test, so it is of another version of djinn-native"
    if compiled["djinn_native"] != __version__:
        return f"it was built from djinn-native {compiled['djinn_native']}, but this is {__version__}"
    if _minor(compiled["torch"]) != _minor(torch.__version__):
        return f"it was built for PyTorch {compiled['torch']}"
    for name, here in _numbers().items():
        if int(compiled[name]) != here:
            return f"the number {name} is {compiled[name]} there and {here} in this PyTorch"
    if said := library.djinn_native_difference().decode():
        return f"{said} differs in this PyTorch"
    tensor = torch.zeros(4, 6)[1:, ::2].fill_(1.0)  # a view with a distinct value in every field
    library.djinn_native_read_tensor.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.djinn_native_read_tensor.restype = None
    fields = (ctypes.c_int64 * _FIELDS)()
    library.djinn_native_read_tensor(tensor._cdata, fields)
    return "" if [*fields] == _fields(tensor) else "it reads other values from a tensor than PyTorch does"


def _fields(tensor: torch.Tensor) -> list[int]:
    """Return PyTorch's values of the fields that `djinn_native_read_tensor` reads."""
    storage = tensor.untyped_storage()
    return [
        tensor.dim(),
        tensor.numel(),
        *tensor.shape,
        *tensor.stride(),
        int(tensor.storage_offset()),
        tensor.itemsize,
        torch._C._dispatch_keys(tensor).raw_repr(),
        tensor._version,
        storage.nbytes(),
        storage.data_ptr(),
        storage._cdata,
        tensor.requires_grad,
        tensor.is_contiguous(),
        True,  # the allocator is that of CPUs
    ]


def _numbers() -> dict[str, int]:
    """Return the numbers of the loaded PyTorch by their names in `djinn_native_abi`."""
    private: Any = torch._C
    return {
        "PrivateUse1": int(private.DispatchKey.PrivateUse1),
        "AutogradPrivateUse1": int(private.DispatchKey.AutogradPrivateUse1),
        "device_type": int(private._autograd.DeviceType.PrivateUse1),
    }


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _one_line(error: OSError) -> str:
    return " ".join(str(error).split())


def _error(what: str) -> NativeLibraryError:
    version = torch.__version__.partition("+")[0]
    return NativeLibraryError(
        f"djinn-native {__version__} cannot be used with PyTorch {torch.__version__}: {what}. In a checkout of Djinn run "
        f'"make TORCH=torch=={version} venv"; otherwise install the wheel of djinn-native that belongs to this Djinn and this PyTorch'
    )
