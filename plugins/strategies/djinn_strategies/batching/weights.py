"""Keep packed copies of weights, in the layout in which a library multiplies a few rows fastest."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import attrs
import torch

from djinn_core import torch_private
from djinn_server.hookspecs.devices import DeviceRuntime

Layout = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


@attrs.frozen
class WeightPlace:
    """Identify a weight by its memory and layout, without keeping the memory alive."""

    memory: ReferenceType[torch.UntypedStorage]
    layout: Layout


@attrs.frozen(eq=False)
class _Copy:
    """A packed copy of a weight, with the trials that use it."""

    packed: torch.Tensor
    users: WeakSet[object]


class PackedWeights:
    """Cache of packed copies of weights that no program writes. A copy is freed with the memory of its weight.

    Call the methods only during a turn of the device.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._written: WeakSet[torch.UntypedStorage] = WeakSet()
        self._kept: WeakKeyDictionary[torch.UntypedStorage, dict[Layout, _Copy]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(storage.nbytes() for storage, packed in list(self._kept.items()) if packed)

    def get(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed copy of a weight, or None if the weight has no copy."""
        found = self._kept.get(weight.untyped_storage(), {}).get(_layout(weight))
        return None if found is None else found.packed

    def pack(self, weight: torch.Tensor, transposed: bool, rows: int, user: object) -> torch.Tensor | None:
        """Pack a weight for products with `rows` rows, and return the copy. The weight must never be written.

        Return None if the device has no such layout or too little memory. Return None also if the copies of this memory
        would exceed its size, as with many different views of it.

        Args:
            weight: the weight.
            transposed: as in `Product`.
            rows: number of rows of the left operand.
            user: keeps the copy alive until it calls `drop`.
        """
        copies = self._kept.setdefault(weight.untyped_storage(), {})
        found = copies.get(_layout(weight))
        if found is not None:
            found.users.add(user)
            return found.packed
        if not torch_private.can_pack(weight) or weight.untyped_storage() in self._written:
            return None
        nbytes = weight.nbytes + sum(prod(shape) * dtype.itemsize for dtype, _, shape, _ in copies)
        if nbytes > weight.untyped_storage().nbytes() or 2 * weight.nbytes > self._runtime.memory()["free"]:
            return None
        packed = torch_private.packed_weight(weight if transposed else weight.t(), rows)
        copies[_layout(weight)] = _Copy(packed, WeakSet((user,)))
        return packed

    def writing(self, values: Iterable[torch.Tensor]) -> None:
        """Free the copies of values that a program is about to write, and never pack these values again."""
        for value in values if self._kept else ():
            if value.untyped_storage() in self._kept:
                del self._kept[value.untyped_storage()]
                self._written.add(value.untyped_storage())

    def drop(self, place: WeightPlace, user: object) -> None:
        """Remove a user of the packed copy of a weight. Free the copy if it has no other user."""
        memory = place.memory()
        found = self._kept.get(memory) if memory is not None else None
        copy = found.get(place.layout) if found is not None else None
        if found is None or copy is None:
            return
        copy.users.discard(user)
        if not copy.users:
            del found[place.layout]


def place_of(weight: torch.Tensor) -> WeightPlace:
    """Return the memory and layout of a weight."""
    return WeightPlace(ref(weight.untyped_storage()), _layout(weight))


def _layout(weight: torch.Tensor) -> Layout:
    return weight.dtype, int(weight.storage_offset()), weight.shape, weight.stride()
