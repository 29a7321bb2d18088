"""The local exception for a failure on the executor, and those that are also of the types that PyTorch defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from djinn_core.errors import (
    ProgramStopped,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteOutOfMemory,
    RemoteTypeError,
    RemoteValueError,
    public,
)


@public("remote-linalg")
class RemoteLinAlgError(RemoteError, torch.linalg.LinAlgError):  # type: ignore[name-defined, misc]
    """An op failed on the executor with a `torch.linalg.LinAlgError`, such as for a singular matrix."""


@public("remote-torch-out-of-memory")
class RemoteTorchOutOfMemory(RemoteOutOfMemory, torch.OutOfMemoryError):
    """The executor's device had no memory left for an op; what `RemoteOutOfMemory` is where PyTorch is there."""


@public("remote-accelerator")
class RemoteAcceleratorError(RemoteError, torch.AcceleratorError):
    """The executor's device reported an error, such as a device-side assert."""


_KINDS: Final[Mapping[str, type[RemoteError]]] = {
    "IndexError": RemoteIndexError,
    "ValueError": RemoteValueError,
    "TypeError": RemoteTypeError,
    "NotImplementedError": RemoteNotImplementedError,
    "UnsupportedOperation": RemoteNotImplementedError,
    "ProgramStopped": ProgramStopped,
    "_LinAlgError": RemoteLinAlgError,
    "LinAlgError": RemoteLinAlgError,
    "OutOfMemoryError": RemoteTorchOutOfMemory,
    "AcceleratorError": RemoteAcceleratorError,
}


def remote_error(
    kind: str, message: str, op: str = "", site: str = "", module_path: str = "", words: str = ""
) -> RemoteError:
    """The local exception for a failure of type name `kind` on an executor; unknown kinds become `RemoteError`."""
    return _KINDS.get(kind, RemoteError)(message, op, site, module_path, words)
