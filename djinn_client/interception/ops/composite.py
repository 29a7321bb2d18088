"""Composite ops: those that are recorded whole, and the decomposition of the others.

PyTorch takes composite ops apart before a backend sees them, except in inference mode and where a backend registers a
kernel of its own. A few are kept whole while no gradient is needed: the program has fewer instructions, and the executor may choose
its own kernel. All others are taken apart in every mode, so that a model records the same program in all of them. Inside of a
`TorchDispatchMode`, such as a counter of flops or a tracer, all are taken apart, as on other devices. Attention is in the module
`attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.runtime_interface import port
from djinn_client.tracebacks import shorten
from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import is_allowed, needs_other_layout

aten = torch.ops.aten

KEPT_WHOLE = (
    aten.linear.default,
    aten.matmul.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
)
# These too, as long as they neither train nor need a gradient; see `evaluation`.
IN_EVALUATION = (
    aten.batch_norm.default,
    aten.gru.input,
    aten.lstm.input,
    aten.rnn_relu.input,
    aten.rnn_tanh.input,
)

# PyTorch takes these apart for backends without a kernel of their own. The CPU and CUDA have one, and the parts round
# differently, so these are recorded whole.
WITH_KERNELS = (
    aten.mish_backward.default,
    aten.native_channel_shuffle.default,
    aten.silu_backward.default,
)
_RECORDED = frozenset({*KEPT_WHOLE, *IN_EVALUATION, *WITH_KERNELS, aten.scaled_dot_product_attention.default})


def is_taken_apart(func: Any) -> bool:
    """True if `func` is decomposed: recorded as the ops that it is made of."""
    if not is_allowed(func.name()):
        return True
    return func not in _RECORDED and torch_private.is_composite(func)


def take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op as the ops that it is made of, each of which is recorded.

    Raises:
        UnsupportedOperation: programs may not contain it, or a server lacks it, and it is not made of other ops.
    """
    if needs_other_layout(func.name()) and port.fallback is None:
        raise UnsupportedOperation(
            f"{func.name()} cannot run on {DEVICE_NAME} with these tensors: it has strided, sparse, quantized and nested ones, each with ops "
            "of their own, and no MKL-DNN ones. Move its inputs to the CPU first"
        )
    kernel = torch_dispatch.composite_kernel(func) or torch_dispatch.backend_kernel(func)
    if kernel is not None and (func.namespace == "prims" or torch_dispatch.kernels_raise_versions(func)):
        with torch_dispatch.notes_views_and_writes():
            return kernel(*args, **kwargs)
    if kernel is not None:
        return kernel(*args, **kwargs)
    if port.fallback is not None:
        return port.fallback.compute(func, args, kwargs)
    if func.name() in port.missing:
        raise UnsupportedOperation(
            f"{func.name()} cannot run on {DEVICE_NAME}: {port.missing[func.name()]} does not have it, and this client runs PyTorch "
            f"{torch.__version__}. Install the same PyTorch on both sides, move its inputs to the CPU first, or let it be computed "
            "there: djinn.configure(client_fallback=True)"
        )
    raise UnsupportedOperation(
        f"{func.name()} cannot run on {DEVICE_NAME}: it is not on the allow-list of ops and is not made of ops that are; "
        "move its inputs to the CPU first, or let it be computed there: djinn.configure(client_fallback=True)"
    )


def _kernel(func: Any, record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[..., Any]:
    @torch_dispatch.never_compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return record(func, args, kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def is_differentiated(args: Iterable[Any]) -> bool:
    """True if autograd records ops on these arguments."""
    return torch.is_grad_enabled() and _needs_gradient(args)


def _needs_gradient(args: Iterable[Any]) -> bool:
    return any(
        _needs_gradient(a) if isinstance(a, (list, tuple)) else isinstance(a, torch.Tensor) and a.requires_grad
        for a in args
    )
