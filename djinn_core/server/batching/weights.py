"""Weights in the layout in which a library multiplies a few rows with them fastest, beside the weights themselves."""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

import attrs
import torch

from djinn_core import torch_private
from djinn_core.hookspecs.devices import DeviceRuntime

Layout = tuple[int, torch.Size, tuple[int, ...]]


@attrs.frozen
class WeightPlace:
    """The place of a weight in its memory, which this does not keep."""

    memory: ReferenceType[torch.UntypedStorage]
    layout: Layout


class PackedWeights:
    """Packed copies of weights that are never written, for as long as their memory lives. Used in turns of a device."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._kept: WeakKeyDictionary[torch.UntypedStorage, dict[Layout, torch.Tensor]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(storage.nbytes() for storage, packed in list(self._kept.items()) if packed)

    def get(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed copy of a weight, if there is one."""
        found = self._kept.get(weight.untyped_storage())
        return None if found is None else found.get(_layout(weight))

    def pack(self, weight: torch.Tensor, transposed: bool, rows: int) -> torch.Tensor | None:
        """Pack a weight for products with so many rows; None where the device has no such layout, or no memory for it.

        `transposed`: as in `Product`. The caller knows that nothing writes the weight.
        """
        found = self.get(weight)
        if found is not None or not torch_private.can_pack(weight):
            return found
        if 2 * weight.nbytes > self._runtime.memory()["free"]:
            return None
        packed = torch_private.packed_weight(weight if transposed else weight.t(), rows)
        self._kept.setdefault(weight.untyped_storage(), {})[_layout(weight)] = packed
        return packed

    def drop(self, place: WeightPlace) -> None:
        """Forget the packed copy of a weight."""
        memory = place.memory()
        found = self._kept.get(memory) if memory is not None else None
        if found is not None:
            found.pop(place.layout, None)


def place_of(weight: torch.Tensor) -> WeightPlace:
    """The place of a weight."""
    return WeightPlace(ref(weight.untyped_storage()), _layout(weight))


def _layout(weight: torch.Tensor) -> Layout:
    return int(weight.storage_offset()), weight.shape, weight.stride()
