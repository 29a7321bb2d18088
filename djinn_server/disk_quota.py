"""Disk quota of a tenant, for journals and spilled values.

Weights may use the rest of the quota, because clients can send them again. A part of the disk always stays free for other
users.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

RESERVE: Final = 1 << 30  # bytes of each disk that stay free
STEP: Final = 16 << 20  # bytes that a writer may write before the disk is checked again


class DiskQuota:
    """Limit the bytes on disk of this process, which works for one tenant.

    Attributes:
        limit: maximum bytes in total, including weights; 0: no limit.
        evict_weights: called with a number of bytes. Evicts weights until the store holds at most that many.
        reserve: bytes of each disk that stay free.
    """

    def __init__(self, limit: int = 0, reserve: int = RESERVE) -> None:
        self.limit = limit
        self.reserve = reserve
        self.evict_weights: Callable[[int], None] = lambda _: None
        self._lock = threading.Lock()
        self._usage: dict[Hashable, int] = {}

    @property
    def used(self) -> int:
        """Bytes on disk, not counting weights."""
        with self._lock:
            return sum(self._usage.values())

    def left_for_weights(self, max_bytes: int) -> int:
        """Return the bytes that weights may use, at most `max_bytes`."""
        return min(max_bytes, max(0, self.limit - self.used)) if self.limit else max_bytes

    def charge(self, owner: Hashable, nbytes: int, path: Path | str) -> str:
        """Set the charge of `owner` to `nbytes` bytes on the disk of `path`. Call this before writing.

        Return "" on success. If the quota or the disk does not allow `nbytes`, leave the charge and return the reason.
        """
        with self._lock:
            before = self._usage.get(owner, 0)
            total = sum(self._usage.values()) - before + nbytes
        if self.limit and total > self.limit:
            return f"you would use {total:,} bytes on disk; your quota is {self.limit:,} bytes"
        if self.limit:
            self.evict_weights(self.limit - total)
        free = free_bytes(path)
        if free - max(0, nbytes - before) < self.reserve:
            return f"the disk has only {free:,} bytes left, and {self.reserve:,} bytes must stay free"
        self.set_usage(owner, nbytes)
        return ""

    def headroom(self, path: Path | str) -> int:
        """Return how many more bytes the quota and the disk of `path` allow."""
        free = max(0, free_bytes(path) - self.reserve)
        return min(free, max(0, self.limit - self.used)) if self.limit else free

    def set_usage(self, owner: Hashable, nbytes: int) -> None:
        """Set the charge of `owner` to `nbytes` bytes, without a check."""
        with self._lock:
            self._usage[owner] = nbytes

    def release(self, owner: Hashable) -> None:
        """Remove the charge of `owner`."""
        with self._lock:
            self._usage.pop(owner, None)


def free_bytes(path: Path | str) -> int:
    """Return the free bytes for this user on the disk of `path`, or 2^62 if unknown."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 1 << 62
