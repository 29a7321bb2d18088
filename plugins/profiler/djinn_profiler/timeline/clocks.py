"""Clocks of executors, compared with the client's clock: estimated from round trips, as NTP does (RFC 5905, section 8).

By the client's clock, a request leaves at `sent` and its reply arrives at `received`. By the executor's clock, the
request is taken at `taken` and done at `done`. So `sent - taken <= offset <= received - done`. The fastest request
gives the lower bound and the fastest reply the upper bound, independent of the executor's work in between. The middle
of the bounds is exact if both ways take equally long; otherwise it is off by half of the difference. Clocks of two
machines drift, so bounds come from samples within a few seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import attrs

WINDOW: Final = 10.0  # seconds within which clocks of PCs drift apart by less than a millisecond
LOOSE: Final = 2.0  # drop a window whose bounds are this many times as wide as the closest
LOOSE_SECONDS: Final = 1e-3  # and wider than this number of seconds


@attrs.define
class _Bounds:
    """Bounds of the clock offset over a window, in seconds, and the times of its first and last sample."""

    first: float
    last: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def offset(self) -> float:
        return (self.low + self.high) / 2


@attrs.define
class ClientClock:
    """Convert times of one executor process to the client's `time.perf_counter()`.

    Samples must be added in the order of `request_sent`.
    """

    _windows: list[_Bounds] = attrs.field(factory=list)
    _close_windows: list[_Bounds] = attrs.field(
        factory=list
    )  # windows with close bounds; empty until they are computed

    def sample(self, request_sent: float, request_received: float, reply_sent: float, reply_received: float) -> None:
        """Add a round trip: `request_sent` and `reply_received` by the client's clock, `request_received` and `reply_sent` by the executor's clock."""
        low, high = request_sent - request_received, reply_received - reply_sent
        self._close_windows = []
        last = self._windows[-1] if self._windows else None
        if last is None or request_sent - last.first > WINDOW:
            self._windows.append(_Bounds(request_sent, request_sent, low, high))
            return
        last.last, last.low, last.high = request_sent, max(last.low, low), min(last.high, high)

    @property
    def has_samples(self) -> bool:
        """Return True if at least one round trip was added."""
        return bool(self._windows)

    @property
    def one_way(self) -> float:
        """Return the estimated seconds of the fastest one-way trip."""
        return max(0.0, min((bounds.width for bounds in self._windows), default=0.0) / 2)

    def at_client(self, moment: float) -> float:
        """Convert a time of the executor's clock to the client's clock."""
        return moment + self._offset(moment)

    def _offset(self, moment: float) -> float:
        """Return the seconds to add to the executor's clock at this moment, interpolated between windows."""
        windows = self._close_windows or self._find_close_windows()
        at = moment + windows[0].offset
        after = bisect_right(windows, at, key=lambda bounds: bounds.middle)
        if after in {0, len(windows)}:
            return windows[min(after, len(windows) - 1)].offset
        before, later = windows[after - 1], windows[after]
        share = (at - before.middle) / max(later.middle - before.middle, 1e-9)
        return before.offset + share * (later.offset - before.offset)

    def _find_close_windows(self) -> list[_Bounds]:
        """Return the windows with close bounds. Bounds are wide if all requests or all replies of a window waited."""
        smallest_width = min(bounds.width for bounds in self._windows)
        self._close_windows = [
            bounds for bounds in self._windows if bounds.width <= LOOSE * smallest_width + LOOSE_SECONDS
        ]
        return self._close_windows
