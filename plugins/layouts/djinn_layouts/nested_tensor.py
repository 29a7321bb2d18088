"""NestedTensor: a strided nested tensor whose elements are on an executor.

Jagged nested tensors are PyTorch's own class over strided tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from djinn_client.interception.handler_support import LazyTensor
from djinn_client.tracebacks import for_users
from djinn_core.ir.layout_operators import NESTED, NESTED_VIEW
from djinn_core.ir.values import contiguous_strides
from djinn_layouts import torch_layouts
from djinn_layouts.parts_tensor import PartsTensor

Sizes: TypeAlias = tuple[tuple[int, ...], ...]


class ComponentStrides(msgspec.Struct, frozen=True):
    """Strides of each component of a nested tensor, and its offset in the tensor's memory, in elements."""

    strides: Sizes
    offsets: tuple[int, ...]


class NestedTensor(PartsTensor):
    """A nested tensor on `remote_accelerator`: the sizes of its components, and their memory.

    PyTorch gets layout and sizes from this class. A dimension in which components differ has a nested integer as its
    size, as in the jagged layout.

    Attributes:
        sizes: sizes of each component.
        held_values: the memory of all components, a one-dimensional remote tensor.
        component_strides: None if the components are contiguous, adjacent and fill `held_values`.
    """

    sizes: Sizes
    held_values: LazyTensor
    component_strides: ComponentStrides | None

    def to_argument(self) -> list[Any]:
        """Return the tensor as an encoded argument."""
        dims, sizes = len(self.sizes[0]) if self.sizes else 0, [n for size in self.sizes for n in size]
        if self.component_strides is None:
            return [NESTED, dims, sizes, self.held_values]
        strides = [step for steps in self.component_strides.strides for step in steps]
        return [NESTED_VIEW, dims, sizes, strides, list(self.component_strides.offsets), self.held_values]

    def take_parts_of(self, other: Any) -> None:
        """Replace the parts of this tensor by those of `other`."""
        self.sizes, self.held_values, self.component_strides = other.sizes, other.held_values, other.component_strides

    def strides_and_offsets(self) -> ComponentStrides:
        """Return strides and offsets of the components. Compute them if the tensor is contiguous."""
        if self.component_strides is not None:
            return self.component_strides
        return ComponentStrides(
            tuple(contiguous_strides(size) for size in self.sizes), tuple(contiguous_offsets(self.sizes))
        )

    def common_size(self, dim: int) -> int | None:
        """Return the size of a dimension, or None if it differs between components. Dimension 0 counts components."""
        if dim == 0:
            return len(self.sizes)
        sizes = {size[dim - 1] for size in self.sizes}
        return sizes.pop() if len(sizes) == 1 else None

    @for_users
    def size(self, dim: int | None = None) -> Any:
        """Return the size of dimension `dim`.

        Raises:
            RuntimeError: `dim` is None, or the components differ in this dimension. CPU nested tensors raise the same error.
        """
        if dim is None:
            raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes. Please file an issue.")
        count = self.common_size(dim % self.dim())
        if count is None:
            raise RuntimeError(f"Given dimension {dim} is irregular and does not have a size.")
        return count

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        inside = ",\n".join(f"  {component!r}" for component in self.detach().unbind())
        return f"nested_tensor([\n{inside}\n], device='{self.device}')"

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        local = self.detach().cpu()
        return torch_layouts.rebuild_from_cpu, (local, self.dtype, str(self.device), self.requires_grad)


def wrap_nested(values: LazyTensor, sizes: Sizes, component_strides: ComponentStrides | None = None) -> NestedTensor:
    """Return a nested tensor with the memory `values`. `component_strides`: None if it is contiguous."""
    tensor: NestedTensor = torch_layouts.make_nested_wrapper(NestedTensor, values.dtype, values.device)
    tensor.held_values, tensor.sizes, tensor.component_strides = values, sizes, component_strides
    return tensor


def symbolic_size(tensor: NestedTensor) -> list[Any]:
    """Return the shape of a nested tensor. Sizes that differ between components are nested integers."""
    inner = range(len(tensor.sizes[0]) if tensor.sizes else 0)
    shape: list[Any] = [len(tensor.sizes)]
    for dim in inner:
        common_size = tensor.common_size(dim + 1)
        lengths = tuple(size[dim] for size in tensor.sizes)
        shape.append(common_size if common_size is not None else torch_layouts.nested_integer(lengths))
    return shape


def element_counts(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of elements of each component."""
    return [math.prod(size) for size in sizes]


def contiguous_offsets(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the offset of each component of a contiguous nested tensor, in elements."""
    return [0, *itertools.accumulate(element_counts(sizes))][: len(sizes)]
