"""Values without data: results that a capture computes from tensors on the meta device are recorded, and never sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn_client.interception.recording.entry import Entry
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.handles import storage_of


class MetaOnlyStorages:
    """Numbers of the storages that have no data. The caller must hold the recorders' lock.

    This propagates: the results and writes of an op with such an operand have no data, either.

    Attributes:
        storages: the numbers; the same set throughout.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def add(self, storage: int) -> None:
        """Note that this storage has no data."""
        self.storages.add(storage)

    def sift(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries that can run, since all their operands have data."""
        present: list[Entry] = []
        for entry in entries:
            if any(storage_of(h) in self.storages for h in entry.inputs):
                self.storages.update(storage_of(h) for h in (*entry.outputs, *entry.writes))
            else:
                present.append(entry)
        return present

    def has(self, handle: int, unsent: Sequence[Entry]) -> bool:
        """True if a value has metadata only and no data, once the entries `unsent` of this thread have run."""
        if self.storages:
            self.sift(unsent)
        return storage_of(handle) in self.storages

    def refuse(self, handles: Iterable[int]) -> None:
        """Refuse a request for data that these storages do not have.

        Raises:
            UnsupportedOperation: one of the handles has no data.
        """
        if any(storage_of(h) in self.storages for h in handles):
            raise UnsupportedOperation(
                "this needs the elements of a tensor that djinn.capture() computed from tensors on the meta device, which "
                "have none: capture recorded it, and nothing can run it. Where a program asks for numbers, give it real "
                "weights; where it does not, ask for the graph, the profile and the plan only"
            )

    def clear(self) -> None:
        """Forget all."""
        self.storages.clear()
