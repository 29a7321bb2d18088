"""Adaptive compression of uploads: used where it saves time, by the link's and the compressor's recent speeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from djinn_core.wire.compression import PLANES_ZSTD, compressed, expanded, supported_compressions

SMALLEST: Final = 1 << 20  # bytes; what is smaller travels as it is
SAMPLE: Final = 256 << 10  # bytes that are compressed to see what it brings
SEEN: Final = (
    16 << 20
)  # bytes that must have been sent before the link's rate counts: the first fill buffers on the way
FASTEST: Final = (
    2e8  # bytes a second, and less than executors expand: on faster links, such as this machine's own, nothing is tried
)
_GAIN: Final = 0.9  # compressing must take less than this part of the time
_RENEWED: Final = 256 << 20  # compressed bytes after which some are sent as they are, to see the link's rate again


class Compressing:
    """Decides for one connection, and compresses."""

    def __init__(self, theirs: Sequence[str]) -> None:
        """`theirs`: the compressions that the executor can read."""
        self._possible = PLANES_ZSTD in theirs and PLANES_ZSTD in supported_compressions()
        self._sent = 0
        self._seconds = 0.0
        self._compressed = 0  # bytes, since the link's rate was seen last

    def sent(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Note that sending `nbytes` took so long. What is long ago counts for less and less.

        Compressed bytes say nothing of the link: the executor takes longer to expand them than they take to arrive.
        """
        if compressed:
            self._compressed += nbytes
            return
        self._compressed = 0
        if self._sent > 4 * SEEN:
            self._sent, self._seconds = self._sent // 2, self._seconds / 2
        self._sent += nbytes
        self._seconds += seconds

    def smaller(self, data: memoryview, item: int) -> bytes | None:
        """`data` (elements of `item` bytes) compressed; None if sending it as it is takes less time."""
        if not self._possible or len(data) < SMALLEST or not self._pays(data, item):
            return None
        coded = compressed(data, item)
        return coded if len(coded) < len(data) else None

    def _pays(self, data: memoryview, item: int) -> bool:
        """True if compressing, sending less and expanding takes less time than sending all bytes. Estimated from a sample."""
        if self._sent < SEEN or self._sent > FASTEST * self._seconds or self._compressed > _RENEWED:
            return False
        link = self._seconds / self._sent  # seconds a byte
        middle = len(data) // 2 // item * item
        sample = data[middle : middle + SAMPLE // item * item]
        started = time.thread_time()
        coded = compressed(sample, item)
        expanded(coded, PLANES_ZSTD, item, len(sample))  # as long as the executor takes, or about that
        coding = (time.thread_time() - started) / len(sample)
        return coding + len(coded) / len(sample) * link < _GAIN * link
