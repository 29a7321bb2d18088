"""Errors that Djinn raises. docs/errors.md lists causes and remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn._lazy_names import lazy_names
from djinn_core.errors import (
    AccessRefused,
    ConfigurationError,
    DeadlineExceeded,
    DjinnError,
    DoesNotFit,
    ForkedProcess,
    InvalidStage,
    PluginError,
    ProgramStopped,
    ProtocolError,
    QuotaExceeded,
    RemoteError,
    RemoteIndexError,
    RemoteNotImplementedError,
    RemoteOutOfMemory,
    RemoteTypeError,
    RemoteValueError,
    ServerBusy,
    SessionLost,
    StartupError,
    TransportError,
    UnsupportedOperation,
    VerificationError,
    WeightsUnavailable,
)

# Errors that derive from PyTorch's classes.
if TYPE_CHECKING:
    from djinn_client.runtime.receiving.failures import (
        RemoteAcceleratorError,
        RemoteLinAlgError,
        RemoteTorchOutOfMemory,
    )

__all__ = [
    "AccessRefused",
    "ConfigurationError",
    "DeadlineExceeded",
    "DjinnError",
    "DoesNotFit",
    "ForkedProcess",
    "InvalidStage",
    "PluginError",
    "ProgramStopped",
    "ProtocolError",
    "QuotaExceeded",
    "RemoteAcceleratorError",
    "RemoteError",
    "RemoteIndexError",
    "RemoteLinAlgError",
    "RemoteNotImplementedError",
    "RemoteOutOfMemory",
    "RemoteTorchOutOfMemory",
    "RemoteTypeError",
    "RemoteValueError",
    "ServerBusy",
    "SessionLost",
    "StartupError",
    "TransportError",
    "UnsupportedOperation",
    "VerificationError",
    "WeightsUnavailable",
]

_MODULES = {
    "djinn_client.runtime.receiving.failures": "RemoteAcceleratorError RemoteLinAlgError RemoteTorchOutOfMemory",
}

if not TYPE_CHECKING:  # type checkers know the names from above
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
