"""Adaptive compression of uploads: parts are compressed where that saves time, by recent rates of the link and of the compressor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from djinn_core.wire.compression import PLANES_ZSTD, compressed, expanded, supported_compressions

SMALLEST: Final = 1 << 20  # bytes of the smallest part that is compressed
SAMPLE: Final = 256 << 10  # bytes of a part that are compressed as a trial
# Bytes that are sent before the rate of the link is known: the first of them fill buffers on the way.
SEEN: Final = 16 << 20
# Bytes a second, fewer than executors expand. On faster links, such as connections within a machine, nothing is compressed.
FASTEST: Final = 2e8
_GAIN: Final = 0.9  # the part of the time without compression that the time with it may have
_RENEWED: Final = 256 << 20  # compressed bytes after which some are sent uncompressed, to measure the link again


class UploadCompressor:
    """Compresses the uploads of one connection where that saves time."""

    def __init__(self, theirs: Sequence[str]) -> None:
        """`theirs`: the compressions that the executor can read."""
        self._possible = PLANES_ZSTD in theirs and PLANES_ZSTD in supported_compressions()
        self._sent = 0
        self._seconds = 0.0
        self._compressed = 0  # bytes since the link was measured

    def note_sent(self, nbytes: int, seconds: float, *, compressed: bool) -> None:
        """Note that sending `nbytes` took so long; recent rates count for more.

        Compressed bytes do not measure the link: the executor may take longer to expand them than they take to arrive.
        """
        if compressed:
            self._compressed += nbytes
            return
        self._compressed = 0
        if self._sent > 4 * SEEN:
            self._sent, self._seconds = self._sent // 2, self._seconds / 2
        self._sent += nbytes
        self._seconds += seconds

    def compress(self, data: memoryview, item: int) -> bytes | None:
        """`data` (elements of `item` bytes) compressed; None where sending it uncompressed takes less time."""
        if not self._possible or len(data) < SMALLEST or not self._pays(data, item):
            return None
        coded = compressed(data, item)
        return coded if len(coded) < len(data) else None

    def _pays(self, data: memoryview, item: int) -> bool:
        """True if compressing, sending and expanding takes less time than sending uncompressed, estimated from a sample."""
        if self._sent < SEEN or self._sent > FASTEST * self._seconds or self._compressed > _RENEWED:
            return False
        link = self._seconds / self._sent  # seconds a byte
        middle = len(data) // 2 // item * item
        sample = data[middle : middle + SAMPLE // item * item]
        started = time.thread_time()
        coded = compressed(sample, item)
        expanded(coded, PLANES_ZSTD, item, len(sample))  # takes about as long as at the executor
        coding = (time.thread_time() - started) / len(sample)
        return coding + len(coded) / len(sample) * link < _GAIN * link
