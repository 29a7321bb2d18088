"""The private functions of PyTorch that make, print and load tensors that are not strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

rebuild_sparse = torch._utils._rebuild_sparse_tensor
rebuild_from_cpu = torch._utils._rebuild_device_tensor_from_cpu_tensor


def format_whole(tensor: torch.Tensor) -> str:
    """A CPU tensor as PyTorch prints it."""
    text: str = torch._tensor_str._str(tensor)
    return text


def make_sparse_wrapper(cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A sparse COO tensor without memory that has this metadata."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, layout=torch.sparse_coo, device=device)


def make_compressed_wrapper(
    cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, layout: torch.layout, device: torch.device
) -> Any:
    """A tensor of a compressed sparse layout without memory. PyTorch asks the class for the layout (`prim::layout`)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=dtype, layout=layout, device=device, dispatch_layout=True
    )


def make_nested_wrapper(cls: type[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """A nested tensor without memory. PyTorch asks the class for its layout (`prim::layout`) and sizes (`aten::sym_size`)."""
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
    """An integer that stands for the sizes of the tensors of a nested one; equal where these are."""
    return torch._C._get_nested_int(hash(tuple(lengths)) % 2**48 + 2**48, 1)
