"""Measure links between executors: after connecting, while transfers arrive, and on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.messages import encode, expect
from djinn_core.wire.peer_messages import LinkMeasurement, LinkProbe

PATIENCE = 5.0  # seconds for which a reply is awaited
WORTH = 1 << 20  # bytes from which on a transfer says how fast a link is: less may lie in buffers on the way
_KEPT = 32  # sightings that wait for the next reply
_PINGS = 3
_BULK = 4 << 20  # bytes that measure a link, where a first small piece did not take long
_SMALL = 64 << 10
_SLOW_SECONDS = 0.01
Send = Callable[[Frame], None]
Receive = Callable[[float], Frame]


class LinkMeasurements:
    """Link measurements that were not reported to the client yet.

    Attributes:
        measurements: the measurements, the oldest first.
    """

    def __init__(self) -> None:
        self.measurements: deque[LinkMeasurement] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def arrived(self, source: int, nbytes: int, seconds: float) -> None:
        """Record that a transfer of `nbytes` bytes from executor `source` took `seconds` to arrive."""
        if nbytes >= WORTH:
            self.note(LinkMeasurement(source, True, nbytes, seconds))

    def note(self, seen: LinkMeasurement) -> None:
        """Add a measurement."""
        with self._lock:
            self.measurements.append(seen)

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
    took, size = _probe(send, receive, _SMALL), _SMALL
    if took < _SLOW_SECONDS:
        took, size = min(_probe(send, receive, _BULK), _probe(send, receive, _BULK)), _BULK
    return latency, size / max(took - 2 * latency, took / 4)


def _probe(send: Send, receive: Receive, size: int) -> float:
    started = time.perf_counter()
    send(Frame(encode(LinkProbe()), [bytes(size)] if size else []))
    expect(receive(PATIENCE).head, LinkProbe)
    return time.perf_counter() - started
