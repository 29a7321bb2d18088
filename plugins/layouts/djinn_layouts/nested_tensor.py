"""NestedTensor: a nested tensor of the strided layout, whose elements are on an executor.

Those of the jagged layout are a class of PyTorch's own over strided tensors.
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
from djinn_layouts import torch_layouts as private
from djinn_layouts.parts_tensor import PartsTensor

Sizes: TypeAlias = tuple[tuple[int, ...], ...]


class Places(msgspec.Struct, frozen=True):
    """Strides and first elements of the tensors of a nested one in its memory, where they do not lie one after the other."""

    strides: Sizes
    offsets: tuple[int, ...]


class NestedTensor(PartsTensor):
    """A nested tensor on `remote_accelerator`: the sizes of its tensors, and the memory in which they lie.

    PyTorch asks it for its layout, and for sizes. A dimension in which the tensors differ has a nested integer for a size, as
    those of the jagged layout have.

    Attributes:
        held_values: remote tensor of one dimension. places: None where the tensors lie in it one after the other, and nothing else does.
    """

    sizes: Sizes
    held_values: LazyTensor
    places: Places | None

    def described(self) -> list[Any]:
        """As an argument of an op."""
        dims, sizes = len(self.sizes[0]) if self.sizes else 0, [n for size in self.sizes for n in size]
        if self.places is None:
            return [NESTED, dims, sizes, self.held_values]
        strides = [step for steps in self.places.strides for step in steps]
        return [NESTED_VIEW, dims, sizes, strides, list(self.places.offsets), self.held_values]

    def become(self, other: Any) -> None:
        """Take over the parts of `other`."""
        self.sizes, self.held_values, self.places = other.sizes, other.held_values, other.places

    def lies(self) -> Places:
        """Strides and first elements of its tensors, also where they lie one after the other."""
        if self.places is not None:
            return self.places
        return Places(tuple(contiguous_strides(size) for size in self.sizes), tuple(starts_of(self.sizes)))

    def common(self, dim: int) -> int | None:
        """Size of all tensors in a dimension of the whole, the first of which counts tensors; None where they differ."""
        if dim == 0:
            return len(self.sizes)
        found = {size[dim - 1] for size in self.sizes}
        return found.pop() if len(found) == 1 else None

    @for_users
    def size(self, dim: int | None = None) -> Any:
        """As of a nested tensor on the CPU.

        Raises:
            RuntimeError: the tensors differ in this dimension.
        """
        if dim is None:
            raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes. Please file an issue.")
        count = self.common(dim % self.dim())
        if count is None:
            raise RuntimeError(f"Given dimension {dim} is irregular and does not have a size.")
        return count

    @for_users  # type: ignore[arg-type] # it is called `self` in no Protocol
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        inside = ",\n".join(f"  {one!r}" for one in self.detach().unbind())
        return f"nested_tensor([\n{inside}\n], device='{self.device}')"

    @for_users
    def __reduce_ex__(self, protocol: Any) -> Any:
        here = self.detach().cpu()
        return private.rebuild_from_cpu, (here, self.dtype, str(self.device), self.requires_grad)


def wrap_nested(values: LazyTensor, sizes: Sizes, places: Places | None = None) -> NestedTensor:
    """A nested tensor of these elements, or of those that lie in `places` of `values`."""
    made: NestedTensor = private.make_nested_wrapper(NestedTensor, values.dtype, values.device)
    made.held_values, made.sizes, made.places = values, sizes, places
    return made


def symbolic_size(tensor: NestedTensor) -> list[Any]:
    """Return the shape of a nested tensor. Sizes that differ between its tensors are nested integers."""
    inner = range(len(tensor.sizes[0]) if tensor.sizes else 0)
    found: list[Any] = [len(tensor.sizes)]
    for dim in inner:
        common = tensor.common(dim + 1)
        lengths = tuple(size[dim] for size in tensor.sizes)
        found.append(common if common is not None else private.nested_integer(lengths))
    return found


def numbers_of(sizes: Sequence[Sequence[int]]) -> list[int]:
    """The number of elements of each tensor."""
    return [math.prod(size) for size in sizes]


def starts_of(sizes: Sequence[Sequence[int]]) -> list[int]:
    """The first element of each tensor, if they lie one after the other."""
    return [0, *itertools.accumulate(numbers_of(sizes))][: len(sizes)]
