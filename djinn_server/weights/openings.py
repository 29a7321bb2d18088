"""Addresses that are being opened: in threads, so that a download keeps no session from its other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from djinn_core.errors import WeightsUnavailable

OPENERS: Final = 16  # addresses that are opened at a time
ABANDONED_SECONDS: Final = 30.0  # without a question, after which no client waits
T = TypeVar("T")


class Opening(Generic[T]):
    """One address that is being opened.

    Attributes:
        found: what is there; it raises `WeightsUnavailable` where that is nothing.
        done, expected: bytes that were downloaded, and that will have been.
        given_up: True if the download was ended, because no session had asked for a while.
    """

    found: Future[T]

    def __init__(self) -> None:
        self.done = self.expected = 0
        self.asked = time.monotonic()
        self.given_up = False

    @property
    def abandoned(self) -> bool:
        """True if no session has asked for a while."""
        return time.monotonic() - self.asked > ABANDONED_SECONDS

    def report(self, done: int, expected: int) -> None:
        """As `ReportDownload`."""
        self.done, self.expected = max(0, done), max(0, expected)
        if self.abandoned:
            self.given_up = True
            raise WeightsUnavailable("no client waits for this download any more")


class Openings(Generic[T]):
    """Opens each address once for all sessions that ask meanwhile. Thread-safe."""

    def __init__(self, open_: Callable[[str, Opening[T]], T]) -> None:
        """`open_`: opens an address, and may report to the opening how far that is."""
        self._open = open_
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._openings: dict[str, Opening[T]] = {}

    def of(self, address: str) -> Opening[T]:
        """The opening of an address, which is under way or begins now. One that has ended is returned once."""
        with self._lock:
            for other in [
                a for a, one in self._openings.items() if one.found.done() and (a == address or one.abandoned)
            ]:
                ended = self._openings.pop(other)
                if other == address and not (ended.given_up or ended.abandoned):
                    return ended
            known = self._openings.get(address)
            if known is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(OPENERS, "djinn-open")
                known = self._openings[address] = Opening()
                known.found = self._threads.submit(self._open, address, known)
            known.asked = time.monotonic()
            return known

    def ended(self, address: str, opening: Opening[T]) -> None:
        """Note that a session has taken the result: for the next one, the files are looked at again."""
        with self._lock:
            if self._openings.get(address) is opening:
                del self._openings[address]
