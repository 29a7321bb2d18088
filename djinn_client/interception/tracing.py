"""Lets Dynamo trace programs on remote tensors, for backends that know what to do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn_client import torch_tracing
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor


def traces(compiler: Any) -> bool:
    """True if the backend behind `compiler`, inside all wrappers that PyTorch adds, accepts remote tensors."""
    return torch_tracing.backend_of(compiler) in port.traced_by


def let_dynamo_trace(backend: Callable[..., Any]) -> None:
    """From now on `torch.compile(backend=backend)` sees remote tensors as it sees tensors of any device.

    For other backends it leaves programs on remote tensors alone: they would compile kernels for a device that is not here.
    """
    if not port.traced_by:
        torch_tracing.trace_as_plain(LazyTensor, traces)
    if backend not in port.traced_by:
        port.traced_by.append(backend)
