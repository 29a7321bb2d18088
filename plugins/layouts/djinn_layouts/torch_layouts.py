"""Private functions of PyTorch for sparse, nested and quantized tensors, for clients and executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

rebuild_sparse = torch._utils._rebuild_sparse_tensor
rebuild_from_cpu = torch._utils._rebuild_device_tensor_from_cpu_tensor


def format_whole(tensor: torch.Tensor) -> str:
    """Return the text that PyTorch prints for a CPU tensor."""
    text: str = torch._tensor_str._str(tensor)
    return text


def make_sparse_wrapper(cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a sparse COO tensor of the class `cls` with this metadata and without memory."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, layout=torch.sparse_coo, device=device)


def make_compressed_wrapper(
    cls: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, layout: torch.layout, device: torch.device
) -> Any:
    """Return a compressed sparse tensor of the class `cls` without memory. PyTorch asks the class for the layout."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=dtype, layout=layout, device=device, dispatch_layout=True
    )


def make_nested_wrapper(cls: type[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a nested tensor of the class `cls` without memory. PyTorch asks the class for layout and sizes."""
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
    """Return a symbolic integer for the sizes of the components in one dimension. Equal sizes give equal integers."""
    return torch._C._get_nested_int(hash(tuple(lengths)) % 2**48 + 2**48, 1)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return compressed indices, plain indices and values of a tensor of a compressed sparse layout."""
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def contiguous_nested_strides(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return strides and offsets, in elements, of the components of a contiguous nested tensor with these sizes."""
    strides, offsets = torch._nested_compute_contiguous_strides_offsets(sizes)
    return strides, offsets


def nested_of_memory(
    memory: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return a strided nested tensor over one-dimensional `memory`.

    The other arguments have an entry for each component. Offsets are relative to the first element of `memory`.
    """
    begins = offsets.add(int(memory.storage_offset()))
    nested: torch.Tensor = torch._nested_view_from_buffer(memory, sizes, strides, begins)
    return nested


def tables_of_nested(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sizes, strides and offsets of the components of a strided nested tensor."""
    return tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()


def memory_of_nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a strided nested tensor as a one-dimensional tensor."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def elements_of_nested(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the concatenated elements of a strided nested tensor, as a copy, and the sizes of its components.

    `tensor.values()` would return the whole storage in the order of memory.
    """
    pieces = [component.reshape(-1) for component in tensor.detach().unbind()]
    elements = torch.cat(pieces) if pieces else tensor.new_empty(0)
    return elements, tensor._nested_tensor_size()


def quantized_per_tensor(integers: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a per-tensor quantized tensor of dtype `dtype` with a copy of these integers."""
    quantized: torch.Tensor = torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)
    assert quantized.dtype == dtype
    return quantized


def quantized_per_channel(
    integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a per-channel quantized tensor of dtype `dtype` with a copy of these integers.

    `scales`, `zero_points`: an element for each index of dimension `axis`.
    """
    quantized: torch.Tensor = torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)
    assert quantized.dtype == dtype
    return quantized
