"""Find inputs that are views of a written input, such as the transpose of a weight that an optimizer updates.

Compiled code creates such a view from the written input, so that it sees the writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.wire.tensors import extent
from djinn_strategies.compiling.region import Region


@attrs.frozen
class WrittenView:
    """An input that is a view of a written input.

    Attributes:
        view: index of the view among the inputs.
        base: index of the written input.
        offset: offset of the view's first element in the storage, in elements.
    """

    view: int
    base: int
    offset: int


def written_views(region: Region, tensors: Sequence[torch.Tensor]) -> tuple[WrittenView, ...]:
    """Return the inputs that are views of dense written inputs and that the region only reads."""
    written_by_address = {
        address_of(tensors[i]): i for i, place in enumerate(region.inputs) if place in region.written_inputs
    }
    views: list[WrittenView] = []
    for index, (place, tensor) in enumerate(zip(region.inputs, tensors, strict=True)):
        base = written_by_address.get(address_of(tensor))
        if base is not None and place not in region.written_inputs and _lies_within(tensor, tensors[base]):
            views.append(WrittenView(index, base, int(tensor.storage_offset())))
    return tuple(views)


def are_followed(aliases: Sequence[WrittenView], tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if the inputs of a run alias each other as in `aliases`."""
    return all(
        address_of(tensors[alias.view]) == address_of(tensors[alias.base])
        and tensors[alias.view].storage_offset() == alias.offset
        and tensors[alias.base].storage_offset() == 0
        for alias in aliases
    )


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _lies_within(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    if not base.is_contiguous() or base.storage_offset() or tensor.dtype is not base.dtype or not tensor.numel():
        return False
    return tensor.storage_offset() + extent(tensor.shape, tensor.stride()) <= base.numel()
