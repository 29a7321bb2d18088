"""Views of views of views: PyTorch keeps for each the way from its base, which would be as long as the chain.

It does so for tensors of Python's own backends only, for which it does not rely on `as_strided`, and copies the way of one
view for the next: a chain of n views takes n squared. So a view far from its base becomes a view of that base. Nothing is
done before a program has such a chain, because a kernel in Python costs each view two microseconds.

Where gradients are wanted the way is left as it is: hooks of the tensors on it are to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.ir.operators import allowed_operators, resolve

LONGEST: Final = 64  # views between one and its base
_NOT_FOLLOWED: Final = frozenset({"aten::detach", "aten::alias", "aten::_fw_primal"})  # or without a way of their own


class ViewChains:
    """Sees to it that no way becomes longer than `LONGEST`, from the first one on that does."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def shorten(self) -> None:
        """A chain has become too long."""
        if self._library is not None or torch.is_inference_mode_enabled():
            return
        self._library = library = torch.library.Library("aten", "IMPL")
        for func in _views():
            plain = torch_private.kernel_at(func, "AutogradPrivateUse1")
            library.impl(func, _kernel(func, plain), "AutogradPrivateUse1", with_keyset=True)


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


def _kernel(func: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    @torch_private.never_compiled
    def kernel(keys: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        return _view(func, plain, keys, given, *args, **kwargs)

    return kernel


def _view(func: Any, plain: Callable[..., Any], keys: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    """The view that `func` makes; `plain` is PyTorch's own kernel."""
    if type(given) is not LazyTensor or given.depth < LONGEST:
        return plain(keys, given, *args, **kwargs)
    base = given._base
    if base is None:
        given.depth = 0
        return plain(keys, given, *args, **kwargs)
    if type(base) is not LazyTensor or base.requires_grad or torch_private.in_forward_mode():
        return plain(keys, given, *args, **kwargs)
    with torch_private.below_autograd():
        made = func(given, *args, **kwargs)
    meta, root = made.remote.meta, base.remote.meta
    if (meta.dtype, meta.conj, meta.neg) != (root.dtype, root.conj, root.neg) or meta.device != root.device:
        return plain(keys, given, *args, **kwargs)
    near = torch.as_strided(base, meta.shape, meta.stride, meta.offset)
    torch_private.take_creation_from(near, given)
    return near


chains: Final = ViewChains()
