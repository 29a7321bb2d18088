"""Streams of programs: consecutive programs of one structure that do not wait for each other's results."""

from __future__ import annotations

import attrs


@attrs.frozen
class Stream:
    """State of the stream that a recurring program belongs to. Empty without a pool of executors.

    Attributes:
        following: number of programs of this structure in flight, whose results are requested but not awaited yet.
        turn: id of the device with the least work for these programs; empty if none is in flight.
        carried: inputs that an executor computed or received since the last program of the structure. The next program
            has to wait for inputs that the last program computes.
    """

    following: int = 0
    turn: str = ""
    carried: frozenset[int] = frozenset()


ALONE = Stream()
