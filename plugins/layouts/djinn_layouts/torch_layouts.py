"""Private functions of PyTorch that make, print and load non-strided tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

rebuild_sparse = torch._utils._rebuild_sparse_tensor
rebuild_from_cpu = torch._utils._rebuild_device_tensor_from_cpu_tensor


def format_whole(tensor: torch.Tensor) -> str:
    """Return a CPU tensor as text, as PyTorch prints it."""
    text: str = torch._tensor_str._str(tensor)
    return text


def make_sparse_wrapper(cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a sparse COO tensor without memory that has this metadata."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, layout=torch.sparse_coo, device=device)


def make_compressed_wrapper(
    cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, layout: torch.layout, device: torch.device
) -> Any:
    """Return a compressed sparse tensor without memory. PyTorch requests the layout from its class (`prim::layout`)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=dtype, layout=layout, device=device, dispatch_layout=True
    )


def make_nested_wrapper(cls: type[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a nested tensor without memory. PyTorch requests layout and sizes from its class."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensor).add(torch._C.DispatchKey.AutogradNestedTensor)
    return torch.Tensor._make_wrapper_subclass(
        cls,
        (0,),
        (0,),
        0,
        torch.contiguous_format,
        dtype,
        torch.strided,
        device,
        False,
        False,
        "sizes",
        False,
        True,
        keys,
    )


def nested_integer(lengths: Sequence[int]) -> Any:
    """Return a symbolic integer for the sizes of the components. Equal sizes give equal integers."""
    return torch._C._get_nested_int(hash(tuple(lengths)) % 2**48 + 2**48, 1)
