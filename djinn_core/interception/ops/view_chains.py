"""Chains of views: PyTorch keeps for each view the path from its base, which would be as long as the chain.

It does so only for tensors of Python backends, for which it does not rely on `as_strided`. It copies the path of one view for the
next, so that a chain of n views takes O(n^2) time. Here a view far from its base becomes a direct view of that base. The kernels for
this are registered only once a program has such a chain, because a kernel in Python costs each view about six microseconds.

Gradients still flow through all views of the chain, because their hooks must run: the next view is made from a stand-in with a short
path, whose autograd node leads to the view that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.operators import allowed_operators, resolve

LONGEST: Final = 64  # views between one and its base, in a program's first chain
_LATER: Final = 16  # the same from then on: each view copies as many
_NOT_FOLLOWED: Final = frozenset({"aten::detach", "aten::alias", "aten::_fw_primal"})  # or without a way of their own


def shorten_chains() -> None:
    """Bound the paths of views to `LONGEST` from now on: a chain has become too long."""
    if device_state.view_kernels is not None or torch.is_inference_mode_enabled():
        return
    device_state.view_kernels = library = torch.library.Library("aten", "IMPL")
    for func in _views():
        plain = torch_private.kernel_at(func, "AutogradPrivateUse1")
        library.impl(func, _kernel(plain), "AutogradPrivateUse1", with_keyset=True)


def _views() -> Iterator[Any]:
    """Ops that return one view of their first operand and are not made of others."""
    for name in sorted(allowed_operators()):
        if not name.startswith("aten::") or name in _NOT_FOLLOWED:
            continue
        func = resolve(name)
        schema = torch_private.schema_of(func)
        if len(schema.returns) != 1 or not schema.arguments or torch_private.is_composite(func):
            continue
        given, made = schema.arguments[0].alias_info, schema.returns[0].alias_info
        if given is not None and made is not None and not given.is_write and str(schema.returns[0].type) == "Tensor":
            yield func


def _kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel in the place of PyTorch's own, `plain`, for a view of a tensor that may be far from its base."""

    @torch_private.never_compiled
    def kernel(keys: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, LazyTensor) and given.depth >= _LATER:
            given = view_near_base(given)
        return plain(keys, given, *args, **kwargs)

    return kernel


def view_near_base(view: LazyTensor) -> LazyTensor:
    """Return a stand-in for `view`, one step from its base; `view` itself if there is no base, or if `as_strided` cannot make it."""
    base = view._base
    if base is None:
        view.depth = 0
        return view
    if not isinstance(base, LazyTensor) or not _looks_alike(view, base) or torch_private.in_forward_mode():
        return view
    if view.requires_grad and torch.is_grad_enabled():
        near: LazyTensor = _ViewNearBase.apply(view)  # type: ignore[no-untyped-call]
    else:
        with torch.set_grad_enabled(torch_private.made_with_gradients(view)):
            near = same_value_on(base, view)
    torch_private.take_creation_from(near, view)
    return near


def _looks_alike(view: LazyTensor, base: LazyTensor) -> bool:
    """True if `as_strided` can make the view from its base."""
    meta, root = view.remote.meta, base.remote.meta
    return (meta.dtype, meta.conj, meta.neg, meta.device) == (root.dtype, root.conj, root.neg, root.device)


def same_value_on(base: torch.Tensor, tensor: LazyTensor) -> LazyTensor:
    """Return a view of `base` with the metadata and the value of `tensor`, which has the same memory."""
    meta = tensor.remote.meta
    thread = device_state.thread
    thread.remade_view = tensor
    try:
        return torch.as_strided(base, meta.shape, meta.stride, meta.offset)  # type: ignore[return-value]
    finally:
        thread.remade_view = None


def remade_view() -> LazyTensor | None:
    """The view that the `as_strided` call under way in this thread makes again; None if it makes a new one."""
    return device_state.thread.remade_view


class _ViewNearBase(torch.autograd.Function):
    """The same as a view, at one step from its base; gradients go on to the view, and so through its hooks."""

    @staticmethod
    def forward(view: LazyTensor) -> LazyTensor:
        assert view._base is not None
        return same_value_on(view._base, view)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del inputs, output
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient
