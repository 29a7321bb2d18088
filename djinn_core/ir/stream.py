"""Streams of programs: programs of one structure that follow each other without waiting for each other's results."""

from __future__ import annotations

import attrs


@attrs.frozen
class Stream:
    """State of the stream that a recurring program belongs to. Empty without a pool of executors.

    Attributes:
        following: number of programs of its structure that are under way: results requested, and not waited for yet.
        turn: id of the device that has least to do for them; empty if nothing follows.
        carried: inputs that an executor has made or was given since the last program of the structure: where that program
            made them, the next one has to wait for it.
    """

    following: int = 0
    turn: str = ""
    carried: frozenset[int] = frozenset()


ALONE = Stream()
