"""Token-bucket rate limits: a burst, then a steady rate. They also limit repeated log lines."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from djinn_core.system.lru import LruCache

BUCKETS_LIMIT: Final = 4096
BURST_LINES: Final = 50  # log lines of a kind that are written at once
LINES_A_SECOND: Final = 1.0  # of a kind, after the burst


class Bucket:
    """A token bucket, which refills by `rate` tokens per second, up to `capacity` tokens. Thread-safe."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = capacity
        self._filled_at = clock()

    def take(self) -> float:
        """Take a token and return 0.0. If the bucket is empty, return the seconds until the next token."""
        with self._lock:
            tokens = self._fill()
            if tokens >= 1.0:
                self._tokens = tokens - 1.0
                return 0.0
            return (1.0 - tokens) / self.rate

    def pace(self) -> float:
        """Take a token even if the bucket is empty. Return the seconds to wait for it."""
        with self._lock:
            self._tokens = self._fill() - 1.0
            return max(0.0, -self._tokens / self.rate)

    def _fill(self) -> float:
        now = self._clock()
        self._tokens = min(self.capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        return self._tokens


class Buckets:
    """Token buckets by key. If there are too many, the least recently used bucket is dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_key: LruCache[str, Bucket] = LruCache(BUCKETS_LIMIT)

    def of(self, key: str, rate: float, capacity: float) -> Bucket:
        """Return the bucket of a key, with its limits set to `rate` and `capacity`."""
        with self._lock:
            bucket = self._by_key.use(key)
            if bucket is None:
                bucket = Bucket(rate, capacity, self._clock)
                self._by_key.store(key, bucket)
            bucket.rate, bucket.capacity = rate, capacity
            return bucket


class LogRateLimit:
    """Limit repeated log lines: the first lines of a kind are written, then one per second with a count.

    Without a limit, a client could fill the disk with lines, or hide important lines among them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, burst: float = BURST_LINES, rate: float = LINES_A_SECOND
    ) -> None:
        self._buckets, self._burst, self._rate = Buckets(clock), burst, rate
        self._skipped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, kind: str) -> int | None:
        """Return how many lines of a kind were skipped before this line, or None if this line must be skipped."""
        wait = self._buckets.of(kind, self._rate, self._burst).take()
        with self._lock:
            if wait:
                self._skipped[kind] += 1
                return None
            return self._skipped.pop(kind, 0)
