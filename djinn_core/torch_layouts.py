"""Private torch functions for tensors of other layouts: sparse, nested and quantized, remote and real ones.

`torch_private` has the other private functions, and the list of all.
"""

from __future__ import annotations

import torch


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return compressed indices, plain indices and values of a tensor of a compressed sparse layout."""
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def contiguous_nested_strides(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return strides and offsets of a contiguous nested tensor with these sizes."""
    strides, offsets = torch._nested_compute_contiguous_strides_offsets(sizes)
    return strides, offsets


def nested_of_memory(
    memory: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return a strided nested tensor over `memory`, which is one-dimensional."""
    begins = offsets.add(int(memory.storage_offset()))
    made: torch.Tensor = torch._nested_view_from_buffer(memory, sizes, strides, begins)
    return made


def tables_of_nested(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sizes, strides and offsets of the tensors of a strided nested tensor."""
    return tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets()


def memory_of_nested(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory of a strided nested tensor, in one dimension."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def elements_of_nested(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a strided nested CPU tensor, copied and concatenated, and the sizes of its tensors.

    `tensor.values()` returns the whole storage in the order of memory.
    """
    pieces = [one.reshape(-1) for one in tensor.detach().unbind()]
    elements = torch.cat(pieces) if pieces else tensor.new_empty(0)
    return elements, tensor._nested_tensor_size()


def quantized_per_tensor(integers: torch.Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a per-tensor quantized tensor with a copy of these elements."""
    made: torch.Tensor = torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)
    assert made.dtype == dtype
    return made


def quantized_per_channel(
    integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a per-channel quantized tensor with a copy of these elements. Scales and zero points belong to dimension `axis`."""
    made: torch.Tensor = torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)
    assert made.dtype == dtype
    return made
