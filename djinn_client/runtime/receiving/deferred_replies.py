"""Deferred replies: those that no thread waits for yet, and the link's round-trip time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from typing import Final

# While the executor sends a reply larger than this it may not read, for no thread takes the reply in.
LARGE_BYTES: Final = 2048
# What fits into the buffers of every kind of connection, so that sending it never waits for the other end to read.
ROOM_BYTES: Final = 64 << 10
_SAMPLES: Final = 16  # of the link's round trip, the least of which counts
SAMPLED_AT_FIRST: Final = 64  # submissions whose round trips are measured where they are alone; of later ones
SAMPLED_EVERY: Final = 8  # one in so many


class DeferredReplies:
    """Replies left for later, those among them that were discarded, and what the executor is known to have read.

    Attributes:
        left: numbers of the submissions whose replies will be asked for later.
        read: byte of the connection up to which the executor has read what was sent.
        large: submissions left for later whose replies are large, oldest first.
        forgotten: those that were discarded.
    """

    def __init__(self) -> None:
        self.large: deque[int] = deque()
        self.left: set[int] = set()
        self.forgotten: deque[int] = deque()  # finalizers only append
        self.read = 0

    def defer(self, number: int, nbytes: int) -> None:
        """Note that the reply to submission `number`, of `nbytes` bytes, will be asked for later."""
        self.left.add(number)
        if nbytes > LARGE_BYTES:
            self.large.append(number)

    def discard(self, number: int) -> None:
        """Mark a reply as one that will not be asked for."""
        self.forgotten.append(number)

    def blocked_by(self, position: int, pending: Container[int]) -> int | None:
        """The large reply that must be taken in before the connection's bytes up to `position` can be sent; or None."""
        while self.large and self.large[0] not in pending:
            self.large.popleft()
        return self.large[0] if self.large and position - self.read > ROOM_BYTES else None

    def take_forgotten(self) -> list[int]:
        """Take the discarded replies; each is returned once."""
        taken: list[int] = []
        while self.forgotten:
            number = self.forgotten.popleft()
            self.left.discard(number)
            taken.append(number)
        return taken


class RoundTrips:
    """The link's round trip: what a lone submission takes beyond the server's own time, at the least of late.

    Attributes:
        alone: the last submission that was sent while no other was under way, and when, in seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.alone = 0, 0.0

    @property
    def seconds(self) -> float | None:
        """None until one was seen."""
        return min(self._samples, default=None)

    def came(self, number: int, server_seconds: float) -> None:
        """Note the reply that a thread has waited for; `server_seconds` of the wait were the server's."""
        alone, began = self.alone
        if alone == number:
            seconds = time.perf_counter() - began - server_seconds
            self._samples.append(max(0.0, seconds))
