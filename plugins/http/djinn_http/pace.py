"""Time limits of requests, so that a client that sends very slowly does not occupy a connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

# For clients without a valid token; below the ten seconds that a server has for its first message.
UNAUTHENTICATED_SECONDS: Final = 6.0
# For authenticated clients: a network may be down for a while.
TRUSTED_SECONDS: Final = 120.0
# A request's time limit grows by a second for this many received bytes.
_BYTES_A_SECOND: Final = 1000.0


class Trusting(Protocol):
    """The client whose requests a connection carries."""

    @property
    def trusted(self) -> bool:
        """Return True if the client is authenticated."""


class RequestTimeLimit:
    """Measures how long the server has waited for the current or next request of a connection.

    Attributes:
        owner: the client whose requests the connection carries, or None before the first request.
    """

    def __init__(self) -> None:
        self.owner: Trusting | None = None
        self._waited = 0.0
        self._bytes = 0
        self._idle = False
        self._since: float | None = time.monotonic()

    @property
    def trusted(self) -> bool:
        """Return True if the connection carries a channel of an authenticated client."""
        return self.owner is not None and self.owner.trusted

    def count_received(self, count: int) -> None:
        """Count received bytes. The first bytes after a response begin the next request."""
        self._bytes += count
        if self._idle:
            self._since, self._idle = time.monotonic(), False

    def headers_complete(self) -> None:
        """Record that the request's headers are complete. The server no longer waits for the client."""
        self._since, self._waited, self._bytes, self._idle = None, 0.0, 0, False

    def response_sent(self) -> None:
        """Record that a request was answered.

        An unauthenticated client that sends no further request soon is disconnected.
        """
        self._since, self._waited, self._bytes, self._idle = time.monotonic(), 0.0, 0, True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as a wait for the request's body."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - self._since
            self._since = None

    @property
    def too_slow(self) -> bool:
        """Return True if the client has sent a request too slowly and must be disconnected."""
        if self._since is None:
            return False
        seconds = self._waited + time.monotonic() - self._since
        return seconds > (TRUSTED_SECONDS if self.trusted else UNAUTHENTICATED_SECONDS) + self._bytes / _BYTES_A_SECOND
