"""Choice of cut points in a program that is sent before its sync point.

A loop without a sync point must not be cut at a fixed number of instructions. Unless that number is a multiple of the
loop's length, every piece would differ from all earlier pieces, and would be planned and sent again. So the content of
the program decides (content-defined chunking): the cut point is at the same op of the loop in every iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

from djinn_client.interception.recording.entry import Entry
from djinn_core.ir.program import CONTENT

CONTEXT = 8  # instructions after a cut point that its hash covers


def steady_cut(entries: Sequence[Entry]) -> int:
    """Return the number of entries to send: up to the position with the smallest context hash in the last three quarters.

    The hash depends on ops and their source lines only. A loop that fits into three quarters of the entries is always
    cut at one point, from its second piece on. A longer loop yields a few kinds of pieces.
    """
    first = max(len(entries) // 4, 1)
    hashes = [hash((entry.call.signature.id & CONTENT, entry.site[1])) for entry in entries[first:]]
    if len(hashes) <= CONTEXT:
        return len(entries)
    contexts = [hash(tuple(hashes[i : i + CONTEXT])) for i in range(len(hashes) - CONTEXT)]
    least = min(contexts)
    return first + len(contexts) - 1 - contexts[::-1].index(least)
