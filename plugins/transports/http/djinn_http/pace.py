"""How long a client may take over a request: who sends a byte a second holds a connection that others could use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# For whoever has not shown a token; below the ten seconds that a server has for its first message.
STRANGER_SECONDS: Final = 6.0
# For whoever has: a network may be away for a while.
TRUSTED_SECONDS: Final = 120.0
# What a request gains by sending on.
_BYTES_A_SECOND: Final = 1000.0


class Pace:
    """The time that one connection was waited for, for the request that it is at.

    Attributes:
        trusted: whether it carries a channel of somebody who has shown a token.
    """

    def __init__(self) -> None:
        self.trusted = False
        self._waited = 0.0
        self._bytes = 0
        self._since: float | None = time.monotonic()

    def came(self, count: int) -> None:
        """So many bytes came. The first ones of a request begin it."""
        self._bytes += count
        if self._since is None and not self._waited:
            self._since = time.monotonic()

    def over(self) -> None:
        """The request is answered, or its headers are here: the client owes nothing now."""
        self._since, self._waited, self._bytes = None, 0.0, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Its body is being waited for."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - self._since
            self._since = None

    @property
    def too_slow(self) -> bool:
        """Whether it has been waited for too long."""
        if self._since is None:
            return False
        waited = self._waited + time.monotonic() - self._since
        return waited > (TRUSTED_SECONDS if self.trusted else STRANGER_SECONDS) + self._bytes / _BYTES_A_SECOND
