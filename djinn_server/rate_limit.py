"""Token-bucket rate limits: a burst, then a steady rate a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from djinn_core.system.lru import LruCache

REMEMBERED: Final = 4096  # keys of which it is known how often they came


class Bucket:
    """A token bucket: fills by `rate` a second, up to `most`. Thread-safe."""

    def __init__(self, rate: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._left = most
        self._at = clock()

    def take(self) -> float:
        """One more; 0.0, or how many seconds there are until there is one again, and then nothing was taken."""
        with self._lock:
            left = self._fill()
            if left >= 1.0:
                self._left = left - 1.0
                return 0.0
            return (1.0 - left) / self.rate

    def pace(self) -> float:
        """One more in any case: how many seconds to wait before it."""
        with self._lock:
            self._left = self._fill() - 1.0
            return max(0.0, -self._left / self.rate)

    def _fill(self) -> float:
        now = self._clock()
        self._left = min(self.most, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left


class Buckets:
    """Token buckets by key; the least recently used are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: LruCache[str, Bucket] = LruCache(REMEMBERED)

    def of(self, key: str, rate: float, most: float) -> Bucket:
        """The bucket of a key, with what it may have now."""
        with self._lock:
            bucket = self._known.use(key)
            if bucket is None:
                bucket = Bucket(rate, most, self._clock)
                self._known.store(key, bucket)
            bucket.rate, bucket.most = rate, most
            return bucket
