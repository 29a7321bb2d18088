"""What a tenant has on disk beside its weights: journals, and values that had to make room in memory.

Weights are kept in what is left of its limit: they can be sent again. And some of the disk is left to others, whatever the limits say.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

RESERVE: Final = 1 << 30  # bytes that stay free
STEP: Final = 16 << 20  # how much somebody may write before it is looked at again


class Disk:
    """Counts what is written by this process, which works for one tenant.

    Attributes:
        limit: bytes that all of it may have, weights included; 0: no limit.
        make_way: has weights leave the store until no more than so many bytes of them are left.
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
        """How many bytes weights may have, of `most`."""
        return min(most, max(0, self.limit - self.taken)) if self.limit else most

    def takes(self, who: Hashable, nbytes: int, where: Path | str) -> str:
        """Somebody has, or wants, so many bytes in all, on the disk of `where`; why that is too much, if it is."""
        self.has(who, nbytes)
        taken = self.taken
        if self.limit and taken > self.limit:
            return f"{taken:,} bytes on disk, of {self.limit:,} that you may have"
        if self.limit:
            self.make_way(self.limit - taken)
        free = free_bytes(where)
        return f"the disk has only {free:,} bytes left" if free < self.reserve else ""

    def has(self, who: Hashable, nbytes: int) -> None:
        """Somebody has so many bytes in all."""
        with self._lock:
            self._taken[who] = nbytes

    def forget(self, who: Hashable) -> None:
        """Somebody has nothing any more."""
        with self._lock:
            self._taken.pop(who, None)


def free_bytes(where: Path | str) -> int:
    """Bytes that this user may still write to the disk of `where`; many where nobody knows."""
    try:
        return shutil.disk_usage(where).free
    except OSError:
        return 1 << 62


DISK: Final = Disk()
