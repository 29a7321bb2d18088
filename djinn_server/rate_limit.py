"""Token-bucket rate limits: a burst, then a steady rate. Also for repeated log lines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from djinn_core.system.lru import LruCache

REMEMBERED: Final = 4096  # keys with a bucket
AT_ONCE: Final = 50  # log lines of a kind
A_SECOND: Final = 1.0  # further ones


class Bucket:
    """A token bucket, which refills by `rate` tokens per second, up to `most` tokens. Thread-safe."""

    def __init__(self, rate: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._left = most
        self._at = clock()

    def take(self) -> float:
        """Take a token and return 0.0. If the bucket is empty, return the seconds until the next token."""
        with self._lock:
            tokens = self._fill()
            if tokens >= 1.0:
                self._left = tokens - 1.0
                return 0.0
            return (1.0 - tokens) / self.rate

    def pace(self) -> float:
        """Take a token even if the bucket is empty. Return the seconds to wait for it."""
        with self._lock:
            self._left = self._fill() - 1.0
            return max(0.0, -self._left / self.rate)

    def _fill(self) -> float:
        now = self._clock()
        self._left = min(self.most, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left


class Buckets:
    """Token buckets by key. If there are too many, the least recently used bucket is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: LruCache[str, Bucket] = LruCache(REMEMBERED)

    def of(self, key: str, rate: float, most: float) -> Bucket:
        """Return the bucket of a key, after its limits were updated."""
        with self._lock:
            bucket = self._known.use(key)
            if bucket is None:
                bucket = Bucket(rate, most, self._clock)
                self._known.store(key, bucket)
            bucket.rate, bucket.most = rate, most
            return bucket


class LogRateLimit:
    """Limit repeated log lines: the first lines of a kind are written, then one per second with a count.

    Without a limit, a client could fill the disk with lines, or hide important lines among them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, at_once: float = AT_ONCE, a_second: float = A_SECOND
    ) -> None:
        self._buckets, self._at_once, self._a_second = Buckets(clock), at_once, a_second
        self._left_out: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, kind: str) -> int | None:
        """Return how many lines of a kind were skipped before this line.

        Return None if this line must be skipped, too.
        """
        wait = self._buckets.of(kind, self._a_second, self._at_once).take()
        with self._lock:
            if wait:
                self._left_out[kind] += 1
                return None
            return self._left_out.pop(kind, 0)
