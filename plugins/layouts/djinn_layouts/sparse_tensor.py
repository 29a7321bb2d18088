"""SparseTensor: a sparse COO tensor whose indices and values are on an executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_client.interception.handler_support import LazyTensor
from djinn_client.tracebacks import for_users
from djinn_core.ir.layout_operators import COO
from djinn_layouts import torch_layouts
from djinn_layouts.parts_tensor import PartsTensor


class SparseTensor(PartsTensor):
    """A sparse COO tensor on `remote_accelerator`: two strided remote tensors, and its shape.

    Attributes:
        held_indices: remote int64 tensor of (sparse_dim, nnz).
        held_values: remote tensor of (nnz, *dense sizes).
        coalesced: True if the indices are known to be sorted and unique.
    """

    held_indices: LazyTensor
    held_values: LazyTensor
    coalesced: bool

    def to_argument(self) -> list[Any]:
        """Return the tensor as an encoded argument."""
        return [COO, self.coalesced, [int(n) for n in self.shape], self.held_indices, self.held_values]

    def take_parts_of(self, other: Any) -> None:
        """Replace the parts of this tensor by those of `other`."""
        self.held_indices, self.held_values, self.coalesced = other.held_indices, other.held_values, other.coalesced

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        # As PyTorch saves sparse tensors of every device.
        detached = self.detach()
        parts = (*torch_layouts.sparse_parts(detached), detached.size(), detached.is_coalesced())
        return torch_layouts.rebuild_sparse, (torch.sparse_coo, parts)


def wrap_sparse(indices: LazyTensor, values: LazyTensor, shape: Sequence[int], coalesced: bool) -> SparseTensor:
    """Return a sparse COO tensor with these parts, without checks."""
    tensor: SparseTensor = torch_layouts.make_sparse_wrapper(SparseTensor, shape, values.dtype, values.device)
    tensor.held_indices, tensor.held_values, tensor.coalesced = indices, values, coalesced
    return tensor
