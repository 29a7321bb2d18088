"""Groups of instructions in a substitution: each group should run on one device; different groups may run in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from djinn_client.interception.recording.recorder import Recorder, Recorders, current


class GroupingRecorder(Recorder):
    """A recorder that notes which of its entries were recorded inside of groups.

    Attributes:
        groups: stretches of entries, first and past the last, each with the number of its group.
    """

    __slots__ = ("groups",)

    def __init__(self, shared: Recorders) -> None:
        super().__init__(shared)
        self.groups: list[tuple[int, int, int]] = []

    def group_of(self, entry: int) -> int:
        """The group of an entry, or -1."""
        return next((number for first, end, number in reversed(self.groups) if first <= entry < end), -1)


@contextmanager
def group(number: int) -> Iterator[None]:
    """In the code of a substitution: what is computed inside the block belongs to a group, and may run beside other groups.

    Placement policies see the groups as the hint `groups`: the ids of the nodes of each, in the order of their numbers.
    """
    recorder = current()
    first = len(recorder.entries)
    try:
        yield
    finally:
        if isinstance(recorder, GroupingRecorder):
            recorder.groups.append((first, len(recorder.entries), number))
