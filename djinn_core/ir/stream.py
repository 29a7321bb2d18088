"""Programs of one structure that follow each other, none of them waiting for what the one before has made."""

from __future__ import annotations

import attrs


@attrs.frozen
class Stream:
    """What is known of the programs around one that comes again and again.

    Attributes:
        following: how many of its structure are under way, whose results somebody asked for and nobody has waited for yet.
        turn: id of the device that has least to do for them; empty where nothing follows.
        carried: inputs that an executor has made or was given since the last one of the structure: if it was that one
            which made them, the next has to wait for it.
    """

    following: int = 0
    turn: str = ""
    carried: frozenset[int] = frozenset()


ALONE = Stream()
