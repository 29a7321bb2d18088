"""Failures on the executor that are also of the types that PyTorch defines, so that `except` clauses find them."""

from __future__ import annotations

import torch

from djinn_core.errors import RemoteError, RemoteOutOfMemory, public, register_remote_kind


@public
class RemoteLinAlgError(RemoteError, torch.linalg.LinAlgError):  # type: ignore[name-defined, misc]
    """An op failed on the executor with a `torch.linalg.LinAlgError`, such as for a singular matrix."""


@public
class RemoteTorchOutOfMemory(RemoteOutOfMemory, torch.OutOfMemoryError):
    """The executor's device had no memory left for an op; what `RemoteOutOfMemory` is where PyTorch is there."""


@public
class RemoteAcceleratorError(RemoteError, torch.AcceleratorError):
    """The executor's device reported an error, such as a device-side assert."""


register_remote_kind("_LinAlgError", RemoteLinAlgError)
register_remote_kind("LinAlgError", RemoteLinAlgError)
register_remote_kind("OutOfMemoryError", RemoteTorchOutOfMemory)
register_remote_kind("AcceleratorError", RemoteAcceleratorError)
