"""Records of storages under a memory limit, and of their copies in the spill space."""

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
class SpilledCopy:
    """Bytes of a storage that lie in the spill space.

    Attributes:
        reference: weak reference to the storage.
        slot: their location.
        resident: True if the storage has its memory as well; the copy is dropped when the storage is written to.
    """

    reference: StorageWeakRef
    slot: Slot
    resident: bool


@attrs.define(eq=False)
class Allocation:
    """A storage that the ledger tracks under a memory limit.

    Attributes:
        key: the storage's number.
        nbytes: size of its contents, resident or not.
        places: positions of a run's environment whose values are views of it. handles: values of sessions that are.
        owner: the session that it belongs to.
        resident: True if its bytes are in memory.
        pinned: True if the client wants them to stay there.
        made_by: the step that can make it again; or -1. seconds: time that the step took.
        dropped: True if its bytes are nowhere, because that step will make them again.
        needed: number of dropped storages that need it to be made again.
    """

    key: int
    storage: torch.UntypedStorage
    nbytes: int
    resident: bool = True
    pinned: bool = False
    places: set[int] = attrs.field(factory=set)
    handles: list[int] = attrs.field(factory=list)
    owner: SessionMemory | None = None
    made_by: int = -1
    seconds: float = 0.0
    dropped: bool = False
    needed: int = 0

    @property
    def movable(self) -> bool:
        """True if the memory may be freed, and can be restored."""
        return self.resident and not self.pinned and self.nbytes >= SMALLEST and self.storage.resizable()


def has_memory(value: Any) -> TypeGuard[torch.Tensor]:
    """Check whether a value is a tensor over memory that can be counted."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
