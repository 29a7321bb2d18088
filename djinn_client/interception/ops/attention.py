"""Attention: recorded as a single op without gradients, otherwise as the fused kernel that the executor's device would select.

PyTorch chooses the kernel of `scaled_dot_product_attention` by device type. For this device it knows only the
decomposition, which holds the attention weights in memory and rounds differently from fused kernels. So Djinn lets
PyTorch choose the kernel for tensors without memory that claim to be on the executor's device type. Djinn records the
chosen kernel: one instruction forward, one backward.

Attention is decomposed if this build of PyTorch cannot choose a kernel for the device type, in forward mode, and under
transforms.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.backends.cuda import flash_sdp_enabled, math_sdp_enabled

from djinn_client import torch_dispatch
from djinn_client.interception.dispatch import record
from djinn_client.interception.native.library import CalledFromCpp
from djinn_client.interception.ops.composite import decompose, is_differentiated
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.shape_inference.inference_cache import keep
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.torch_dispatch import never_compiled
from djinn_client.tracebacks import for_users
from djinn_core.logs import get_logger
from djinn_core.system.interrupts import interrupt_mask

log = get_logger("djinn.interception")

aten = torch.ops.aten

_WHOLE = aten.scaled_dot_product_attention.default
_FUSED_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

CHOICES_LIMIT = 4096  # remembered choices
_choices: dict[tuple[Any, ...], Any] = {}


@never_compiled
@for_users
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Handle `aten::scaled_dot_product_attention` if C++ does not record it whole.

    With dropout, gradients, or inside of a dispatch mode, the client chooses the kernel: the program must contain the
    drawing of random numbers, and the mode must see the kernel. Otherwise the executor chooses, unless the program
    restricts the choice (`sdpa_kernel`).
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}
    everything = (query, key, value, mask, dropout, causal)
    if torch_dispatch.in_forward_mode() or not isinstance(query, LazyTensor):
        return decompose(_WHOLE, everything, options)  # type: ignore[no-any-return]
    free = flash_sdp_enabled() and math_sdp_enabled() and not dropout and not torch_dispatch.dispatch_modes()
    if free and not is_differentiated((query, key, value, mask)):
        return record(_WHOLE, everything, options)  # type: ignore[no-any-return]
    return _run_selected_kernel(everything, options)


def _run_selected_kernel(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """Run attention with the kernel that the executor's device would select.

    Raises:
        RuntimeError: the arguments do not match, or no allowed kernel supports them.
    """
    query, key, value, mask, dropout, causal = args
    remote = all(t is None or isinstance(t, LazyTensor) for t in args[:4])
    if not remote or not _can_choose(_device_kind()) or _choice(args, options) is not _FUSED_ON_CPU:
        return decompose(_WHOLE, args, options)  # type: ignore[no-any-return]
    if mask is not None and mask.dtype is torch.bool:
        # 0-dim CPU tensors travel in the instruction.
        mask = torch.where(mask, *(torch.scalar_tensor(n, dtype=query.dtype, device="cpu") for n in (0.0, -math.inf)))
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, attn_mask=mask, scale=options.get("scale")
    )
    return out  # type: ignore[no-any-return]


def _device_kind() -> str:
    """Return the type of the executor's device. In a capture, this begins no session, and returns "" if none is open."""
    if not port.is_open():
        if current().captures:
            return ""
        port.sink.open()
    return port.describe(0)[1].kind


@functools.cache
def _can_choose(kind: str) -> bool:
    """Return True if PyTorch can choose the kernel for this device type in this process."""
    if kind != "cpu":
        log.debug(
            "attention under autograd is decomposed: this PyTorch cannot tell which kernel the executor's device uses",
            kind=kind,
        )
    return kind == "cpu"


def _choice(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the first op that PyTorch calls to compute attention on a CPU, to learn which kernel it chooses."""
    query, key, value, mask, dropout, causal = args
    metas = [t.remote.meta for t in (query, key, value, mask) if t is not None]
    # PyTorch compares sizes with each other, with 0 and with 1, and reads the last stride. Nothing else matters.
    sizes: dict[int, int] = {}
    compared = tuple([sizes.setdefault(n, len(sizes)) for m in metas for n in m.shape])
    inner = tuple([m.stride[-1:] == (1,) for m in metas])
    masked = None if mask is None else mask.requires_grad
    allowed = flash_sdp_enabled(), math_sdp_enabled()
    choice_key = (
        *[m.tensor_class for m in metas],
        compared,
        inner,
        masked,
        dropout,
        causal,
        *options.items(),
        *allowed,
    )
    choice = _choices.get(choice_key)
    return keep(_choices, choice_key, _choose(args, options), CHOICES_LIMIT) if choice is None else choice


class _KernelChosen(Exception):  # noqa: N818 - a signal between two functions, never seen by users
    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func


class _Probe(torch.Tensor):
    """A CPU tensor without memory, for the mode `_FirstOp`."""

    __torch_function__ = torch_dispatch.disabled_torch_function  # type: ignore[assignment]
    __torch_dispatch__ = torch_dispatch.disabled_torch_function


class _FirstOp(CalledFromCpp):
    """A dispatch mode that raises `_KernelChosen` for the first op.

    It is a mode, because a tensor with `__torch_dispatch__` would make PyTorch import DTensor.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _KernelChosen(func)


@torch_dispatch.without_modes
def _choose(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    query, key, value, mask, *rest = args
    try:
        with interrupt_mask, torch.inference_mode(False), torch.enable_grad():
            probes = [_probe(t, query.dtype) for t in (query, key, value)]
            if mask is not None:
                # The choice depends on whether the mask needs a gradient, and on no other requested gradient.
                mask_gradient = mask.requires_grad and mask.is_floating_point()
                mask = _probe(mask, query.dtype).requires_grad_(mask_gradient)
            with _FirstOp():  # type: ignore[no-untyped-call]
                _WHOLE(*probes, mask, *rest, **options)
    except _KernelChosen as chosen:
        return chosen.func
    raise AssertionError("PyTorch called no op to compute attention on a probe tensor")


def _probe(tensor: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    meta = tensor.remote.meta
    # A bool mask becomes a float mask first.
    probe_dtype = dtype if meta.dtype is torch.bool else meta.dtype
    return torch_dispatch.make_wrapper(_Probe, meta.shape, meta.stride, meta.offset, probe_dtype, torch.device("cpu"))  # type: ignore[no-any-return]


@never_compiled
def backward_on_cpu(*args: Any, **kwargs: Any) -> Any:
    """Return the gradients of the fused CPU kernel. Unlike PyTorch's, they can be differentiated again."""
    if args[0] is None:  # the result is unused
        return None, None, None
    if not is_differentiated((*args, kwargs.get("attn_mask"))):
        return record(_BACKWARD_ON_CPU, args, kwargs)
    grad, query, key, value, out, logsumexp, dropout, causal = args
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    rest = (out.detach(), logsumexp.detach(), dropout, causal)
    return _Gradients.apply(grad, query, key, value, mask, rest, scale)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """Gradients of attention by its fused kernel. Second-order gradients are those of decomposed attention."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        grad, query, key, value, mask, rest, scale = args
        ctx.save_for_backward(grad, query, key, value, mask)
        ctx.causal, ctx.scale = rest[-1], scale
        results = record(_BACKWARD_ON_CPU, (grad, query, key, value, *rest), {"attn_mask": mask, "scale": scale})
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *gradients_of, mask = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            grad, *inputs = (t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in gradients_of)
            grouped = inputs[0].shape[1] != inputs[1].shape[1]
            results = decompose(_WHOLE, (*inputs, mask, 0.0, ctx.causal), {"scale": ctx.scale, "enable_gqa": grouped})
            first = torch.autograd.grad(results, inputs, grad, create_graph=True)
            second = torch.autograd.grad(first, (grad, *inputs), grads, create_graph=again, allow_unused=True)
        return (*second, None, None, None)
