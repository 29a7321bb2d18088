"""Deferred responses: those that no thread waits for yet, and the link's round-trip time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from typing import Final

# While the executor sends an answer larger than this it may not read, for no thread takes the answer in.
LARGE_BYTES: Final = 2048
# What fits into the buffers of every kind of connection, so that sending it never waits for the other end to read.
ROOM_BYTES: Final = 64 << 10
_SAMPLES: Final = 16  # of the link's round trip, the least of which counts


class DeferredResponses:
    """Responses left for later, those among them that were discarded, and what the executor is known to have read."""

    def __init__(self) -> None:
        self._large: deque[int] = deque()
        self._left: set[int] = set()
        self._forgotten: deque[int] = deque()  # finalizers only append
        self._read = 0

    def defer(self, number: int, nbytes: int) -> None:
        """Note that the answer to submission `number`, of `nbytes` bytes, will be asked for later."""
        self._left.add(number)
        if nbytes > LARGE_BYTES:
            self._large.append(number)

    def discard(self, number: int) -> None:
        """Mark a response as one that will not be asked for."""
        self._forgotten.append(number)

    def __contains__(self, number: int) -> bool:
        return number in self._left

    def taken(self, number: int) -> None:
        """It was asked for."""
        self._left.discard(number)

    def has_read(self, position: int) -> None:
        """The executor has read what was sent up to this byte of the connection."""
        self._read = position

    @property
    def unsettled(self) -> bool:
        """True if the executor may be blocked until a response is read, or a discarded response is kept."""
        return bool(self._large or self._forgotten)

    def blocked_by(self, position: int, pending: Container[int]) -> int | None:
        """The large answer that must be taken in before the connection's bytes up to `position` can be sent; or None."""
        while self._large and self._large[0] not in pending:
            self._large.popleft()
        return self._large[0] if self._large and position - self._read > ROOM_BYTES else None

    def take_forgotten(self) -> list[int]:
        """Take the discarded responses; each is returned once."""
        taken: list[int] = []
        while self._forgotten:
            number = self._forgotten.popleft()
            self._left.discard(number)
            taken.append(number)
        return taken


class RoundTrips:
    """The link's round trip: what a lone submission takes beyond the server's own time, at the least of late."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._alone = (0, 0.0)

    @property
    def seconds(self) -> float | None:
        """None until one was seen."""
        return min(self._samples, default=None)

    def sent_alone(self, number: int) -> None:
        """Submission `number` is being sent while no other is under way."""
        self._alone = (number, time.perf_counter())

    def came(self, number: int, server_seconds: float) -> None:
        """Note the response that a thread has waited for; `server_seconds` of the wait were the server's."""
        if self._alone[0] == number:
            self._samples.append(max(time.perf_counter() - self._alone[1] - server_seconds, 0.0))
