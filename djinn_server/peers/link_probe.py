"""Measure links between executors: after connecting, while transfers arrive, and on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.messages import encode, expect
from djinn_core.wire.peer_messages import LinkMeasurement, LinkProbe

PATIENCE = 5.0  # timeout of a reply in seconds
MEASURABLE_BYTES = 1 << 20  # least size of a transfer that measures a link; buffers may hold a smaller one
_UNREPORTED_LIMIT = 32  # measurements that wait for the next reply to the client
_PINGS = 3
_LARGE = 4 << 20  # bytes of a probe for the bandwidth of a fast link
_SMALL = 64 << 10  # bytes of a probe for the bandwidth of a slow link
_SLOW_SECONDS = 0.01  # time of a small probe over a slow link
Send = Callable[[Frame], None]
Receive = Callable[[float], Frame]


class LinkMeasurements:
    """Link measurements that have not been reported to the client.

    Attributes:
        measurements: the measurements, the oldest first.
    """

    def __init__(self) -> None:
        self.measurements: deque[LinkMeasurement] = deque(maxlen=_UNREPORTED_LIMIT)
        self._lock = threading.Lock()

    def arrived(self, source: int, nbytes: int, seconds: float) -> None:
        """Record that a transfer from executor `source` took `seconds` to arrive. Ignore a transfer of few bytes."""
        if nbytes >= MEASURABLE_BYTES:
            self.add(LinkMeasurement(source, True, nbytes, seconds))

    def add(self, measurement: LinkMeasurement) -> None:
        """Add a measurement."""
        with self._lock:
            self.measurements.append(measurement)

    def take(self) -> list[LinkMeasurement]:
        """Return the unreported measurements, and remove them."""
        with self._lock:
            measurements = list(self.measurements)
            self.measurements.clear()
        return measurements


def measure(send: Send, receive: Receive) -> tuple[float, float]:
    """Measure an idle link. Return its latency in seconds and its bandwidth in bytes per second.

    `receive`: returns the next reply within a timeout in seconds.

    Raises:
        TransportError: the connection has ended.
        TimeoutError: the other end does not answer.
    """
    latency = min(_probe(send, receive, 0) for _ in range(_PINGS)) / 2
    seconds, size = _probe(send, receive, _SMALL), _SMALL
    if seconds < _SLOW_SECONDS:
        seconds, size = min(_probe(send, receive, _LARGE), _probe(send, receive, _LARGE)), _LARGE
    return latency, size / max(seconds - 2 * latency, seconds / 4)


def _probe(send: Send, receive: Receive, size: int) -> float:
    start = time.perf_counter()
    send(Frame(encode(LinkProbe()), [bytes(size)] if size else []))
    expect(receive(PATIENCE).head, LinkProbe)
    return time.perf_counter() - start
