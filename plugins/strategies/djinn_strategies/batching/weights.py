"""Keep packed copies of weights, in the layout in which a library multiplies a few rows fastest."""

from __future__ import annotations

from math import prod
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import attrs
import torch

from djinn_core import torch_private
from djinn_server.hookspecs.devices import DeviceRuntime

Layout = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


@attrs.frozen
class WeightKey:
    """Identify a weight by its storage and layout, without keeping the storage alive."""

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

        self._copies: WeakKeyDictionary[torch.UntypedStorage, dict[Layout, _Copy]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(storage.nbytes() for storage, copies in list(self._copies.items()) if copies)

    def get(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the packed copy of a weight, or None if the weight has no copy."""
        copy = self._copies.get(weight.untyped_storage(), {}).get(_layout(weight))
        return None if copy is None else copy.packed

    def pack(self, weight: torch.Tensor, transposed: bool, rows: int, user: object) -> torch.Tensor | None:
        """Pack a weight for products with `rows` rows, and return the copy. The weight must never be written.

        Return None if PyTorch cannot pack this weight, or if less than twice the weight's bytes are free. Also return
        None if all copies of the weight's storage would exceed the storage's size, as with many views of it.

        Args:
            weight: the weight.
            transposed: as in `Product`.
            rows: number of rows of the left operand.
            user: keeps the copy alive until `drop` is called for it.
        """
        copies = self._copies.setdefault(weight.untyped_storage(), {})
        copy = copies.get(_layout(weight))
        if copy is not None:
            copy.users.add(user)
            return copy.packed
        if not torch_private.can_pack(weight):
            return None
        nbytes = weight.nbytes + sum(prod(shape) * dtype.itemsize for dtype, _, shape, _ in copies)
        if nbytes > weight.untyped_storage().nbytes() or 2 * weight.nbytes > self._runtime.memory()["free"]:
            return None
        packed_weight = torch_private.packed_weight(weight if transposed else weight.t(), rows)
        copies[_layout(weight)] = _Copy(packed_weight, WeakSet((user,)))
        return packed_weight

    def drop(self, key: WeightKey, user: object) -> None:
        """Remove a user of the packed copy of a weight. Free the copy if it has no other user."""
        memory = key.memory()
        copies = self._copies.get(memory) if memory is not None else None
        copy = copies.get(key.layout) if copies is not None else None
        if copies is None or copy is None:
            return
        copy.users.discard(user)
        if not copy.users:
            del copies[key.layout]


def key_of(weight: torch.Tensor) -> WeightKey:
    """Return the key of a weight."""
    return WeightKey(ref(weight.untyped_storage()), _layout(weight))


def _layout(weight: torch.Tensor) -> Layout:
    return weight.dtype, int(weight.storage_offset()), weight.shape, weight.stride()
