"""Entries of a recorder: one recorded op each, before the entries of a program are frozen."""

from __future__ import annotations

import msgspec

from djinn_core.ir.module_path import ModuleCall
from djinn_core.ir.program import Call, Site, Slot


class Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One recorded op. The garbage collector, which each op would else bring nearer, does not look at it: no cycle leads through one.

    Attributes:
        call: everything that follows from the op, its metadata and its scalars.
        handles: of its operands, then of its new results. slots: its scalars.
        site: the line of the user's code that issued it. module: the call of a module inside which it was issued.
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
        """Handles of the operands that the op writes into."""
        return [self.handles[position] for position in self.call.writes]


class SentEntries(msgspec.Struct, eq=False):
    """Entries that were sent while a capture is under way, and handles of the values that were waited for."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    fetched: set[int] = msgspec.field(default_factory=set)
