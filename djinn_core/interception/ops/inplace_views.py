"""Ops that change metadata in place, such as `unsqueeze_`, under autograd.

For tensors of Python backends, PyTorch's autograd makes a view again by the ops that first made it, from its base. After a change of
metadata these ops make another view, or fail. The kernels here make a changed view a direct view of its base, with its new metadata, as
autograd does on the CPU. A changed base becomes a view of a hidden tensor that goes on being the base of the earlier views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.interception.ops.view_chains import same_value_on, view_near_base
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.reference_counts import counts_beside
from djinn_core.torch_objects import swap_contents

aten = torch.ops.aten
_OPS: Final = (
    aten.as_strided_.default,
    aten.resize_.default,
    aten.resize_as_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.t_.default,
    aten.transpose_.default,
    aten.unsqueeze_.default,
)
_USES: Final = 2  # of a tensor in a kernel, if nothing refers to it but the caller and the kernel


def register() -> torch.library.Library:
    """Register the kernels; in force as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    for func in _OPS:
        plain = torch_private.kernel_at(func, "AutogradPrivateUse1")
        library.impl(func, _kernel(plain), "AutogradPrivateUse1", with_keyset=True)
    plain = torch_private.kernel_at(aten.detach_.default, "AutogradPrivateUse1")
    library.impl(aten.detach_.default, _detaching(plain), "AutogradPrivateUse1", with_keyset=True)
    return library


def _kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel in the place of PyTorch's own, `plain`."""

    @torch_private.never_compiled
    def kernel(keys: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(given, LazyTensor) and given._base is None and _has_views(given):
            _become_view(given)
        changed = plain(keys, given, *args, **kwargs)
        if isinstance(given, LazyTensor) and given._base is not None:
            _follow_metadata(given)
        return changed

    return kernel


def _detaching(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel in the place of PyTorch's own, `plain`, which refuses views. To the user, a changed base is still a base."""

    @torch_private.never_compiled
    def kernel(keys: Any, given: Any) -> Any:
        if isinstance(given, LazyTensor) and isinstance(given._base, LazyTensor) and given._base.hidden:
            swap_contents(given, given.detach())
            return given
        return plain(keys, given)

    return kernel


def _has_views(base: LazyTensor) -> bool:
    """Return True if there are views of `base`, and its history can be that of another tensor."""
    if torch_private.uses_of(base) <= _USES or counts_beside([base.remote.storage]) == [1]:
        return False
    return not ((base.is_leaf and base.requires_grad) or base.retains_grad or base._backward_hooks)


def _become_view(base: LazyTensor) -> None:
    with torch.enable_grad():
        view = same_value_on(base, base)
    swap_contents(base, view)
    view.hidden = True


def _follow_metadata(view: LazyTensor) -> None:
    """Have autograd make `view` from its base by the metadata that it has now."""
    near = view if view.retains_grad else view_near_base(view)  # PyTorch cannot swap tensors that retain gradients
    if near is not view:
        view.depth = near.depth
        swap_contents(view, near)
