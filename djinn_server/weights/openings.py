"""Open weight addresses in background threads, so that a download does not block its session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from djinn_core.errors import WeightsUnavailable

OPENERS: Final = 16  # addresses that are opened at the same time
ABANDONED_SECONDS: Final = 30.0  # time without a request after which no client waits for an opening
T = TypeVar("T")


class Opening(Generic[T]):
    """A weight address that is being opened.

    Attributes:
        future: future with the tensors at the address, or with `WeightsUnavailable`.
        done: bytes downloaded so far.
        expected: bytes of the whole download; 0 before the first report.
        last_request: time (`time.monotonic`) at which a session last requested the address.
        is_aborted: True if the download was aborted because the opening was abandoned.
    """

    future: Future[T]

    def __init__(self) -> None:
        self.done = self.expected = 0
        self.last_request = time.monotonic()
        self.is_aborted = False

    @property
    def is_abandoned(self) -> bool:
        """True if no session has requested the address for `ABANDONED_SECONDS`."""
        return time.monotonic() - self.last_request > ABANDONED_SECONDS

    def report(self, bytes_done: int, bytes_expected: int) -> None:
        """Record the progress of a download. It is a `ReportDownload`: both numbers are bytes.

        Raises:
            WeightsUnavailable: no session waits for the download any more.
        """
        self.done, self.expected = max(0, bytes_done), max(0, bytes_expected)
        if self.is_abandoned:
            self.is_aborted = True
            raise WeightsUnavailable("the download was aborted, because no client waits for it any more")


class Openings(Generic[T]):
    """Open each address once for all sessions that request it. Thread-safe."""

    def __init__(self, open_: Callable[[str, Opening[T]], T]) -> None:
        """`open_`: opens an address in a background thread, and may report progress to the `Opening`."""
        self._open = open_
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._openings: dict[str, Opening[T]] = {}

    def of(self, address: str) -> Opening[T]:
        """Return the opening of an address, and start it if necessary. A finished opening goes to one caller only."""
        with self._lock:
            for finished in [
                a
                for a, candidate in self._openings.items()
                if candidate.future.done() and (a == address or candidate.is_abandoned)
            ]:
                opening = self._openings.pop(finished)
                if finished == address and not (opening.is_aborted or opening.is_abandoned):
                    return opening
            pending = self._openings.get(address)
            if pending is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(OPENERS, "djinn-open")
                pending = self._openings[address] = Opening()
                pending.future = self._threads.submit(self._open, address, pending)
            pending.last_request = time.monotonic()
            return pending

    def remove(self, address: str, opening: Opening[T]) -> None:
        """Drop a finished opening after a session has used it. The next request then checks the files again."""
        with self._lock:
            if self._openings.get(address) is opening:
                del self._openings[address]
