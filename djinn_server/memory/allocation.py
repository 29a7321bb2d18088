"""Records of storages under a memory limit, and of their copies elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_server.memory.spill import SpillExtent

if TYPE_CHECKING:
    from djinn_server.memory.session_memory import SessionMemory

SMALLEST = 64 << 10  # bytes; what is smaller stays where it is


class SourceBytes(Protocol):
    """Bytes that are read again from where they came, such as a weight file, so that evicting them writes nothing."""

    def unchanged(self) -> bool:
        """True if they can be read, as far as is known."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with them.

        Raises:
            OSError: they are not what they were, or cannot be read.
        """


@attrs.define(eq=False)
class StoredCopy:
    """Bytes of a storage that lie elsewhere.

    Attributes:
        reference: weak reference to the storage.
        nbytes: number of them.
        place: their location in the spill space, or where they are read again.
        resident: True if the storage has its memory as well; a spilled copy is dropped when the storage is written to.
    """

    reference: StorageWeakRef
    nbytes: int
    place: SpillExtent | SourceBytes
    resident: bool


@attrs.define(eq=False)
class Allocation:
    """A storage that the ledger tracks under a memory limit.

    Attributes:
        key: the storage's number.
        nbytes: size of its contents, resident or not.
        places: positions of a run's environment whose values are views of it.
        holders: handles of values that are views of it, by session; several sessions have weights that they share.
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
    holders: dict[SessionMemory, list[int]] = attrs.field(factory=dict)
    made_by: int = -1
    seconds: float = 0.0
    dropped: bool = False
    needed: int = 0

    @property
    def movable(self) -> bool:
        """True if the memory may be freed, and can be restored."""
        return self.resident and not self.pinned and self.nbytes >= SMALLEST and self.storage.resizable()
