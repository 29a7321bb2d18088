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


class Places(msgspec.Struct, frozen=True):
    """Strides and offsets of the components of a non-contiguous nested tensor."""

    strides: Sizes
    offsets: tuple[int, ...]


class NestedTensor(PartsTensor):
    """A nested tensor on `remote_accelerator`: the sizes of its components, and their memory.

    PyTorch gets layout and sizes from this class. A dimension in which components differ has a nested integer as its
    size, as in the jagged layout.

    Attributes:
        held_values: one-dimensional remote tensor.
        places: None if the components are adjacent and fill it.
    """

    sizes: Sizes
    held_values: LazyTensor
    places: Places | None

    def described(self) -> list[Any]:
        """Return the tensor as an encoded argument."""
        dims, sizes = len(self.sizes[0]) if self.sizes else 0, [n for size in self.sizes for n in size]
        if self.places is None:
            return [NESTED, dims, sizes, self.held_values]
        strides = [step for steps in self.places.strides for step in steps]
        return [NESTED_VIEW, dims, sizes, strides, list(self.places.offsets), self.held_values]

    def become(self, other: Any) -> None:
        """Replace the parts of this tensor by those of `other`."""
        self.sizes, self.held_values, self.places = other.sizes, other.held_values, other.places

    def lies(self) -> Places:
        """Return strides and offsets of the components, even of a contiguous tensor."""
        if self.places is not None:
            return self.places
        return Places(tuple(contiguous_strides(size) for size in self.sizes), tuple(starts_of(self.sizes)))

    def common(self, dim: int) -> int | None:
        """Return the size of a dimension if it is equal in all components, else None. Dimension 0 counts components."""
        if dim == 0:
            return len(self.sizes)
        sizes = {size[dim - 1] for size in self.sizes}
        return sizes.pop() if len(sizes) == 1 else None

    @for_users
    def size(self, dim: int | None = None) -> Any:
        """Return sizes as a CPU nested tensor does.

        Raises:
            RuntimeError: the components differ in this dimension.
        """
        if dim is None:
            raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes. Please file an issue.")
        count = self.common(dim % self.dim())
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


def wrap_nested(values: LazyTensor, sizes: Sizes, places: Places | None = None) -> NestedTensor:
    """Return a nested tensor with these elements. `places`: strides and offsets of its components in `values`."""
    tensor: NestedTensor = torch_layouts.make_nested_wrapper(NestedTensor, values.dtype, values.device)
    tensor.held_values, tensor.sizes, tensor.places = values, sizes, places
    return tensor


def symbolic_size(tensor: NestedTensor) -> list[Any]:
    """Return the shape of a nested tensor. Sizes that differ between its tensors are nested integers."""
    inner = range(len(tensor.sizes[0]) if tensor.sizes else 0)
    shape: list[Any] = [len(tensor.sizes)]
    for dim in inner:
        common = tensor.common(dim + 1)
        lengths = tuple(size[dim] for size in tensor.sizes)
        shape.append(common if common is not None else torch_layouts.nested_integer(lengths))
    return shape


def numbers_of(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of elements of each component."""
    return [math.prod(size) for size in sizes]


def starts_of(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the offset of each component of a contiguous nested tensor."""
    return [0, *itertools.accumulate(numbers_of(sizes))][: len(sizes)]
