"""Packed copies of weights, in the layout that a library multiplies fastest with a few rows."""

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
    """The position of a weight in its memory, without a reference to the memory."""

    memory: ReferenceType[torch.UntypedStorage]
    layout: Layout


@attrs.frozen(eq=False)
class _Copy:
    """A copy and its users."""

    packed: torch.Tensor
    users: WeakSet[object]


class PackedWeights:
    """Packed copies of weights that nothing writes, for as long as their memory lives.

    Used only during a turn of the device.
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
        """Return the packed copy of a weight, if any."""
        found = self._kept.get(weight.untyped_storage(), {}).get(_layout(weight))
        return None if found is None else found.packed

    def pack(self, weight: torch.Tensor, transposed: bool, rows: int, user: object) -> torch.Tensor | None:
        """Pack a weight for products with this number of rows.

        Return None if the device has no such layout, or no memory, or if the copies would take more than the weight's storage: views of it
        vary. `transposed`: as in `Product`. `user` holds the copy until it calls `drop`. The weight must never be written.
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
        """Free the copies of these values, which are written now, and pack them no more."""
        for value in values if self._kept else ():
            if value.untyped_storage() in self._kept:
                del self._kept[value.untyped_storage()]
                self._written.add(value.untyped_storage())

    def drop(self, place: WeightPlace, user: object) -> None:
        """Free the packed copy of a weight, if this was its last user."""
        memory = place.memory()
        found = self._kept.get(memory) if memory is not None else None
        copy = found.get(place.layout) if found is not None else None
        if found is None or copy is None:
            return
        copy.users.discard(user)
        if not copy.users:
            del found[place.layout]


def place_of(weight: torch.Tensor) -> WeightPlace:
    """Return the position of a weight in its memory."""
    return WeightPlace(ref(weight.untyped_storage()), _layout(weight))


def _layout(weight: torch.Tensor) -> Layout:
    return weight.dtype, int(weight.storage_offset()), weight.shape, weight.stride()
