"""Rate limit for repeated log lines: the first ones are all written, then one a second, with the number of those left out."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from djinn_server.rate_limit import Buckets

AT_ONCE: Final = 50
A_SECOND: Final = 1.0


class LogRateLimit:
    """Decides which lines are written.

    Otherwise a client could fill the disk with lines, or hide other lines among them.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, at_once: float = AT_ONCE, a_second: float = A_SECOND
    ) -> None:
        self._buckets, self._at_once, self._a_second = Buckets(clock), at_once, a_second
        self._left_out: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, kind: str) -> int | None:
        """Return the number of skipped lines of that kind before this one; None if this one is skipped, too."""
        wait = self._buckets.of(kind, self._a_second, self._at_once).take()
        with self._lock:
            if wait:
                self._left_out[kind] += 1
                return None
            return self._left_out.pop(kind, 0)
