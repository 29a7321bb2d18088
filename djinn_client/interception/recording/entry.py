"""Entries of a recorder, one per recorded op, before a program is frozen; and storages whose entries are never sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.handles import storage_of
from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Call, Site, Slot


class Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A recorded op. The garbage collector ignores entries, because no reference cycle contains an entry.

    Attributes:
        call: the inferred call: op, metadata of operands and results, form.
        handles: handles of its operands, then of its new results.
        slots: its scalars.
        site: the line of the user's code that issued it.
        module: the module call that issued it.
    """

    call: Call
    handles: tuple[int, ...]
    slots: tuple[Slot, ...]
    site: Site
    module: ModuleCall | None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Handles of the operands."""
        return self.handles[: self.call.operand_count]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Handles of the new results."""
        return self.handles[self.call.operand_count :]

    @property
    def writes(self) -> list[int]:
        """Handles of the operands that the op writes."""
        return [self.handles[position] for position in self.call.writes]


class SentEntries(msgspec.Struct, eq=False):
    """Entries that were sent during a capture.

    Attributes:
        entries: the entries, in order.
        fetched: handles of the values that the program waited for.
    """

    entries: list[Entry] = msgspec.field(default_factory=list)
    fetched: set[int] = msgspec.field(default_factory=set)


class MetaOnlyStorages:
    """Storages without data: only their metadata exists. The caller must hold the recorders' lock.

    The results and writes of an op with such an operand have no data, either.

    Attributes:
        storages: numbers of the storages. The attribute always refers to one set object.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()

    def add(self, storage: int) -> None:
        """Mark a storage as having no data."""
        self.storages.add(storage)

    def sift(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries that can run, because all their operands have data. Mark the results and writes of the other entries."""
        present: list[Entry] = []
        for entry in entries:
            if any(storage_of(h) in self.storages for h in entry.inputs):
                self.storages.update(storage_of(h) for h in (*entry.outputs, *entry.writes))
            else:
                present.append(entry)
        return present

    def has(self, handle: int, unsent: Sequence[Entry]) -> bool:
        """Return True if a value has metadata but no data after the entries `unsent` of this thread."""
        if self.storages:
            self.sift(unsent)
        return storage_of(handle) in self.storages

    def refuse(self, handles: Iterable[int]) -> None:
        """Raise an error if values without data are requested.

        Raises:
            UnsupportedOperation: one of the handles has no data.
        """
        if any(storage_of(h) in self.storages for h in handles):
            raise UnsupportedOperation(
                "this op needs the elements of a tensor that djinn.capture() computed from tensors on the meta device, "
                "which have no elements. Capture the program with real weights, or ask only for the graph, the profile "
                "and the plan"
            )

    def clear(self) -> None:
        """Forget all storages."""
        self.storages.clear()
