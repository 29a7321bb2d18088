"""CompressedTensor: a sparse CSR, CSC, BSR or BSC tensor whose indices and values are on an executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from djinn_client.interception.handler_support import LazyTensor
from djinn_client.tracebacks import for_users
from djinn_layouts import torch_layouts
from djinn_layouts.parts_tensor import PartsTensor

BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
IN_BLOCKS = frozenset({torch.sparse_bsr, torch.sparse_bsc})
LAYOUTS = BY_ROWS | IN_BLOCKS | {torch.sparse_csc}


class CompressedTensor(PartsTensor):
    """A tensor of a compressed sparse layout on `remote_accelerator`: three strided remote tensors, and its shape.

    PyTorch gets the layout through `prim::layout`.

    Attributes:
        held_layout: the compressed sparse layout.
        held_compressed: compressed indices, a remote tensor of (*batch, number of rows + 1). CSC and BSC compress
            columns instead of rows. BSR and BSC count rows and columns of blocks.
        held_plain: plain indices, a remote tensor of (*batch, nnz).
        held_values: remote tensor of (*batch, nnz, *block sizes, *dense sizes).
    """

    held_layout: torch.layout
    held_compressed: LazyTensor
    held_plain: LazyTensor
    held_values: LazyTensor

    def to_argument(self) -> list[Any]:
        """Return the tensor as an encoded argument."""
        kind = str(self.held_layout).removeprefix("torch.")
        size = [int(n) for n in self.shape]
        return [kind, size, self.held_compressed, self.held_plain, self.held_values]

    def dense_dim_count(self) -> int:
        """Return the number of dense dimensions."""
        blocks = 2 if self.held_layout in IN_BLOCKS else 0
        return self.held_values.dim() - self.held_plain.dim() - blocks

    def take_parts_of(self, other: Any) -> None:
        """Replace the parts of this tensor by those of `other`."""
        self.held_compressed, self.held_plain = other.held_compressed, other.held_plain
        self.held_values = other.held_values

    @for_users
    def stride(self, dim: int | None = None) -> Any:  # noqa: ARG002 - as PyTorch has it
        """Raise an error, as on the CPU.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("Sparse CSR tensors do not have strides")

    @for_users
    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> NoReturn:  # noqa: ARG002
        """Raise an error, as on the CPU.

        Raises:
            RuntimeError: always.
        """
        name = str(self.held_layout).removeprefix("torch.sparse_").upper()
        raise RuntimeError(f"Sparse {name} tensors do not have is_contiguous")

    @for_users
    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> NoReturn:
        """Raise an error, as on the CPU.

        Raises:
            RuntimeError: always.
        """
        self.is_contiguous(memory_format)

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        # As PyTorch saves sparse tensors of every device.
        parts = (*torch_layouts.compressed_parts(self.detach()), self.size())
        return torch_layouts.rebuild_sparse, (self.held_layout, parts)


def wrap_compressed(
    layout: torch.layout, compressed: LazyTensor, plain: LazyTensor, values: LazyTensor, shape: Sequence[int]
) -> CompressedTensor:
    """Return a compressed sparse tensor with these parts, without checks."""
    tensor: CompressedTensor = torch_layouts.make_compressed_wrapper(
        CompressedTensor, shape, values.dtype, layout, values.device
    )
    tensor.held_layout = layout
    tensor.held_compressed, tensor.held_plain, tensor.held_values = compressed, plain, values
    return tensor
