"""Disk quota of a tenant: journals and values spilled from memory, beside its weights.

Weights use the rest of the limit, since they can be sent again. A part of the disk always stays free for other users.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

RESERVE: Final = 1 << 30  # bytes that stay free
STEP: Final = 16 << 20  # bytes that a writer may write before the disk is checked again


class Disk:
    """Counts the bytes that this process, which works for one tenant, has on disk.

    Attributes:
        limit: the most bytes in all, weights included; 0: no limit.
        make_way: evicts weights from the store until at most that number of bytes of them is left.
        reserve: bytes of every disk that stay free.
    """

    def __init__(self, limit: int = 0, reserve: int = RESERVE) -> None:
        self.limit = limit
        self.reserve = reserve
        self.make_way: Callable[[int], None] = lambda _: None
        self._lock = threading.Lock()
        self._taken: dict[Hashable, int] = {}

    @property
    def taken(self) -> int:
        """Bytes of all but weights."""
        with self._lock:
            return sum(self._taken.values())

    def left_for_weights(self, most: int) -> int:
        """Number of bytes that weights may use, at most `most`."""
        return min(most, max(0, self.limit - self.taken)) if self.limit else most

    def takes(self, who: Hashable, nbytes: int, where: Path | str) -> str:
        """Note that `who` has, or wants, `nbytes` in all on the disk of `where`; the reason why that is too much, or empty."""
        self.has(who, nbytes)
        taken = self.taken
        if self.limit and taken > self.limit:
            return f"{taken:,} bytes on disk, of {self.limit:,} that you may have"
        if self.limit:
            self.make_way(self.limit - taken)
        free = free_bytes(where)
        return f"the disk has only {free:,} bytes left" if free < self.reserve else ""

    def has(self, who: Hashable, nbytes: int) -> None:
        """Note that `who` has `nbytes` in all."""
        with self._lock:
            self._taken[who] = nbytes

    def forget(self, who: Hashable) -> None:
        """Note that `who` has nothing on disk any more."""
        with self._lock:
            self._taken.pop(who, None)


def free_bytes(where: Path | str) -> int:
    """Bytes that this user may still write to the disk of `where`; a large number where that is unknown."""
    try:
        return shutil.disk_usage(where).free
    except OSError:
        return 1 << 62
