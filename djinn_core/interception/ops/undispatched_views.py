"""Views of remote tensors for code that turns Python dispatch off, in which they are tensors without memory.

Classes that wrap a tensor do so to give the wrapper of a view the storage of the wrapper of its base: they run the view on wrappers, and
`set_` the result. What these kernels make has the shape and the storage, and no value on an executor. Where Python dispatch is
on, which is everywhere else, PyTorch does not come to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from djinn_core import torch_private

aten = torch.ops.aten
# Each backend registers its own; those of the CPU look at sizes and strides alone.
_VIEWS: Final = (aten.view.default, aten.as_strided.default, aten.unfold.default, aten._reshape_alias.default)


def register() -> torch.library.Library:
    """Register the kernels; in force as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL")
    for func in _VIEWS:
        kernel = torch_private.never_compiled(_calling(torch_private.kernel_at(func, "CPU")))
        library.impl(func, kernel, "PrivateUse1", with_keyset=True)
    library.impl(aten.set_.source_Tensor, torch_private.never_compiled(_share_storage), "PrivateUse1")
    return library


def _calling(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` as a function of Python, which can be kept from being compiled."""

    def view(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(keys, *args, **kwargs)

    return view


def _share_storage(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`set_` of a wrapper that has the sizes of `source` already."""
    torch_private.share_storage(target, source)
    return target
