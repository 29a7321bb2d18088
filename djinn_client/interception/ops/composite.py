"""Composite ops: some are recorded as single ops, the others are decomposed.

PyTorch decomposes composite ops before a backend sees them, except in inference mode and if a backend registers its own
kernel. Djinn keeps a few ops whole while no gradient is needed: the program has fewer instructions, and the executor
may choose its own kernel. All others are decomposed in every mode, so that a model records the same program in each
mode. Inside a `TorchDispatchMode`, such as a FLOP counter or a tracer, all are decomposed, as on other devices. The
module `attention` handles attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.ops.custom_operators import kept_whole, refusal, runs_whole
from djinn_client.interception.runtime_interface import port
from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import is_allowed, is_custom, needs_other_layout

aten = torch.ops.aten

# kernels.cpp has the same list, and says when these ops are recorded whole. Their parts round differently.
_RECORDED = frozenset({
    *(getattr(aten, name).default for name in ("linear", "matmul", "layer_norm", "rms_norm", "batch_norm")),
    *(getattr(aten, name).input for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")),
    *(getattr(aten, name).default for name in ("mish_backward", "native_channel_shuffle", "silu_backward")),
    aten.scaled_dot_product_attention.default,
})  # fmt: skip


def is_decomposed(func: Any) -> bool:
    """Return True if `func` is decomposed: recorded as its constituent ops."""
    if is_custom(func):
        return not runs_whole(func)
    if not is_allowed(func.name()):
        return True
    return func not in _RECORDED and torch_private.is_composite(func)


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decompose an op, and record its parts.

    Raises:
        UnsupportedOperation: `port.fallback` is None, and the op needs MKL-DNN tensors or has no decomposition. The
            message says why executors cannot run the op.
    """
    if needs_other_layout(func.name()) and port.fallback is None:
        raise UnsupportedOperation(
            f"{func.name()} cannot run on {DEVICE_NAME} with these tensors: the device has strided, sparse, quantized and "
            "nested tensors, but no MKL-DNN tensors. Move the op's inputs to the CPU first"
        )
    kernel = torch_dispatch.composite_kernel(func)
    if kernel is None and func.name() not in kept_whole:
        kernel = torch_dispatch.backend_kernel(func)
    if kernel is not None and (func.namespace == "prims" or torch_dispatch.kernels_raise_versions(func)):
        with torch_dispatch.notes_views_and_writes():
            return kernel(*args, **kwargs)
    if kernel is not None:
        return kernel(*args, **kwargs)
    if port.fallback is not None:
        return port.fallback.run(func, args, kwargs)
    if is_custom(func):
        raise UnsupportedOperation(refusal(func))
    if func.name() in port.missing:
        raise UnsupportedOperation(
            f"{func.name()} cannot run on {DEVICE_NAME}: {port.missing[func.name()]} does not have this op, and this client runs "
            f"PyTorch {torch.__version__}. Install the same PyTorch on both sides, move the op's inputs to the CPU first, or "
            "let Djinn compute it on this machine: djinn.configure(client_fallback=True)"
        )
    raise UnsupportedOperation(
        f"{func.name()} cannot run on {DEVICE_NAME}: neither this op nor its decomposition is on the allow-list of ops. "
        "Move its inputs to the CPU first, or let Djinn compute it on this machine: djinn.configure(client_fallback=True)"
    )


def is_differentiated(args: Iterable[Any]) -> bool:
    """Return True if autograd records ops on these arguments."""
    return torch.is_grad_enabled() and _needs_gradient(args)


def _needs_gradient(args: Iterable[Any]) -> bool:
    return any(
        _needs_gradient(a) if isinstance(a, (list, tuple)) else isinstance(a, torch.Tensor) and a.requires_grad
        for a in args
    )
