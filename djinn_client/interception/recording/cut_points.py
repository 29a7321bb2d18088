"""Choice of cut points in a program that is sent before its sync point.

A loop without a sync point must not be cut at a fixed number of instructions: unless that number is a multiple of the loop's
length, every piece would differ from all before, and be planned and sent again. So the cut point is chosen by the content
of the program (content-defined chunking), which puts it at the same point of the loop in every iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from djinn_client.interception.recording.entry import Entry
from djinn_core.ir.program import CONTENT

CONTEXT = 8  # instructions behind a cut point whose hash is compared


def steady_cut(entries: Sequence[Entry]) -> int:
    """Number of entries to send: up to the last position, in their last three quarters, with the least hash of its context.

    The hash depends on ops and their source lines only. A loop that fits into three quarters of the entries is cut at one
    point only from its second piece on; a longer loop yields a few kinds of pieces.
    """
    first = max(len(entries) // 4, 1)
    looks = [hash((entry.call.signature.id & CONTENT, entry.site[1])) for entry in entries[first:]]
    if len(looks) <= CONTEXT:
        return len(entries)
    contexts = [hash(tuple(looks[i : i + CONTEXT])) for i in range(len(looks) - CONTEXT)]
    least = min(contexts)
    return first + len(contexts) - 1 - contexts[::-1].index(least)
