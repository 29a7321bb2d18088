"""One piece of memory, whoever looks into it, and what is known of bytes that lie elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import attrs
import torch

from djinn_core.server.memory.spill import Slot
from djinn_core.torch_objects import StorageWeakRef

if TYPE_CHECKING:
    from djinn_core.server.memory.session import SessionMemory

SMALLEST = 64 << 10  # bytes; what is smaller stays where it is


@attrs.define(eq=False)
class Copy:
    """Bytes of a storage that lie in the spill space.

    Attributes:
        reference: to the storage, which it does not keep.
        slot: where they lie.
        resident: whether the storage has its memory as well; then it is not written into, or the copy is forgotten.
    """

    reference: StorageWeakRef
    slot: Slot
    resident: bool


@attrs.define(eq=False)
class Allocation:
    """A storage while somebody watches over memory.

    Attributes:
        key: the storage's number.
        nbytes: of what it contains, wherever that lies.
        places: positions of a run's environment that look into it. handles: values of sessions that do.
        owner: the session that it belongs to.
        resident: whether its bytes are in memory.
        made_by: the step that made it, where it can do so again; or -1. seconds: what that took.
        dropped: whether its bytes are nowhere, because that step will make them again.
        needed: by how many that were dropped, to make them again.
    """

    key: int
    storage: torch.UntypedStorage
    nbytes: int
    resident: bool = True
    places: set[int] = attrs.field(factory=set)
    handles: list[int] = attrs.field(factory=list)
    owner: SessionMemory | None = None
    made_by: int = -1
    seconds: float = 0.0
    dropped: bool = False
    needed: int = 0

    @property
    def movable(self) -> bool:
        """Whether its memory can be taken away and given back."""
        return self.resident and self.nbytes >= SMALLEST and self.storage.resizable()


def has_memory(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor over memory that can be counted."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
