"""Links between the executors of a pool, and their free memory: the latest reports, and the values that plans use.

Executors report the duration of large transfers. The client makes them measure links without recent large transfers. Plans
use one speed for each link. If observed speeds differ from it by a factor of two, the speed is replaced and programs are
planned again. New plans use the free memory that executors reported last. Cached plans are valid until the free memory of a
device changes by a factor of two, or an allocation on it fails.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from djinn_core.ir.costs import DeviceCapabilities, Link, NetworkTopology
from djinn_core.logs import get_logger
from djinn_core.wire.messages import Room
from djinn_core.wire.peer_messages import LinkMeasurement, MeasureLink
from djinn_pool.relay import Relay

# Overhead in seconds of a transfer between executors besides the wire: a part of the program ends, data is packed and passed between
# threads, and the next part begins. Measured between ops of milliseconds, which evict this code from the caches; between empty ops
# the overhead is 0.2 ms (2026-11-27, two shared cores).
HANDLING: Final = 1e-3
FACTOR: Final = 2.0  # factor by which a link counts as changed
LESS: Final = 0.95  # share of the planned memory: less free memory counts as changed if an allocation failed
ENOUGH: Final = 3  # number of agreeing observations
KEPT: Final = 5  # observations per median
QUIET: Final = 30.0  # seconds without a timed transfer, after which a link is measured
DOUBTED: Final = 0.2  # seconds between measurements of a link that may have changed
SETTLED: Final = 5.0  # seconds for which a new link speed stays
NOTICED: Final = 5e-4  # latency difference in seconds below which a change is ignored
_log = get_logger("djinn.pool")


@attrs.define(eq=False)
class ObservedLink:
    """A link between two executors.

    Attributes:
        link: the bandwidth and latency that plans use.
        last_observed: time of the last observation or measurement request, by the pool's clock.
        changed: time at which `link` was replaced.
        rates: observed bandwidths since then, in bytes per second.
        latencies: observed latencies since then, in seconds.
    """

    link: Link
    last_observed: float
    changed: float = 0.0
    rates: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT))
    latencies: deque[float] = attrs.field(factory=lambda: deque(maxlen=KEPT))

    def record(self, measurement: LinkMeasurement, now: float) -> None:
        """Record an observed transfer on the link."""
        self.last_observed = now
        if measurement.seconds > 0:
            self.rates.append(measurement.nbytes / measurement.seconds)
        if measurement.latency is not None:
            self.latencies.append(measurement.latency + HANDLING)

    def is_due(self, now: float) -> bool:
        """Return True if the link should be measured now: it was idle for long, or its bandwidth may have changed."""
        doubted = bool(self.rates) and _differs(self.rates[-1], self.link.bandwidth)
        return now - self.last_observed > (DOUBTED if doubted else QUIET)

    def update_speed(self, now: float) -> bool:
        """Replace the speed that plans use if observed speeds differ enough from it. Return True if it was replaced."""
        if now - self.changed < SETTLED:
            return False
        rate, latency = self.link.bandwidth, self.link.latency
        if len(self.rates) >= ENOUGH and _differs(statistics.median(self.rates), rate):
            rate = statistics.median(self.rates)
        if len(self.latencies) >= ENOUGH:
            median_latency = statistics.median(self.latencies)
            if abs(median_latency - latency) > NOTICED and _differs(median_latency, latency):
                latency = median_latency
        found_link = attrs.evolve(self.link, bandwidth=rate, latency=latency)
        if found_link == self.link:
            return False
        _log.info("the speed of a link has changed, programs are planned again", before=self.link, now=found_link)
        self.link, self.changed = found_link, now
        self.rates.clear()
        self.latencies.clear()
        return True


def _ignored(_: Sequence[DeviceCapabilities]) -> None:
    """Ignore changes of free memory. This is the default of `when_room_changed`."""


def _differs(rate: float, reference: float) -> bool:
    return not reference / FACTOR <= rate <= reference * FACTOR


class PoolTopology:
    """Links and free memory of a pool. The caller holds the sink's lock.

    Attributes:
        topology: the devices and links that plans use now.
        when_room_changed: called with `devices` after the free memory of a device has changed.
        changes: number of changes so far that make cached plans invalid.
    """

    def __init__(
        self,
        relays: Sequence[Relay],
        devices: Sequence[DeviceCapabilities],
        measured: Sequence[Link],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the topology.

        Args:
            relays: relay of each executor, by number.
            devices: device of each executor, by number.
            measured: links between the devices.
            clock: function that returns seconds.
        """
        self._relays = relays
        self._devices = list(devices)
        self._present = list(range(len(devices)))
        self._clock = clock
        self._links: dict[tuple[int, int], ObservedLink] = {}
        self._next = clock() + DOUBTED
        self._planned_room = [device.memory_free for device in devices]  # free memory for which cached plans are valid
        self.when_room_changed: Callable[[Sequence[DeviceCapabilities]], None] = _ignored
        self.changes = 0
        self._adopt(measured)
        self.topology = NetworkTopology(tuple(devices), tuple(measured))

    def _adopt(self, measured: Sequence[Link]) -> None:
        """Replace the links by `measured`. Links that existed before keep their observations."""
        now, before = self._clock(), self._links
        numbers = {self._devices[number].id: number for number in self._present}
        self._assumed = [link for link in measured if link.source not in numbers]
        pairs = {(numbers[link.source], numbers[link.target]): link for link in measured if link.source in numbers}
        self._links = {pair: before.get(pair) or ObservedLink(link, now) for pair, link in pairs.items()}

    def add_device(self, device: DeviceCapabilities) -> None:
        """Add the device of the executor with the next number."""
        self._devices.append(device)
        self._planned_room.append(device.memory_free)

    def links_among(self, executors: frozenset[int]) -> list[Link]:
        """Return the links between the given executors, and the default links for pairs without a measurement."""
        links = [link.link for pair, link in self._links.items() if executors.issuperset(pair)]
        return [*links, *self._assumed]

    def change_executors(self, present: Sequence[int], measured: Sequence[Link], indexes: Sequence[int]) -> None:
        """Update the executors, because some have joined or left.

        Args:
            present: numbers of the present executors.
            measured: the first measurements of the links between them.
            indexes: number of the executor at each device index, from index 1 on.
        """
        self._present = list(present)
        self._adopt(measured)
        self.topology = attrs.evolve(self.topology, indexes=tuple([self._devices[number].id for number in indexes]))
        self._update_topology()

    def _update_topology(self) -> None:
        devices = tuple([self._devices[number] for number in self._present])
        links = (*[link.link for link in self._links.values()], *self._assumed)
        self.topology = attrs.evolve(self.topology, devices=devices, links=links)
        self.changes += 1

    @property
    def devices(self) -> Sequence[DeviceCapabilities]:
        """Return the device of each executor that ever was in the pool, by number, with its latest capabilities."""
        return self._devices

    def replace_devices(self, devices: Sequence[DeviceCapabilities]) -> None:
        """Replace the capabilities of devices, found by their ids. Keep the free memory that executors reported."""
        by_id = {device.id: device for device in devices}
        self._devices = [  # with the free memory that executors reported since the session began
            attrs.evolve(by_id.get(d.id, d), memory_free=d.memory_free) for d in self._devices
        ]
        self._update_topology()

    def process_reports(self) -> int:
        """Process the executors' reports, and request measurements of idle links. Return the attribute `changes`."""
        now, has_changed = self._clock(), False
        for number in self._present:
            relay = self._relays[number]
            if not relay.has_news:
                continue
            if links := relay.take_seen():
                self._take_measurements(number, links, now)
            if (room := relay.take_room()) is not None:
                self._record_free_memory(number, room)
                has_changed = True
        if has_changed:  # one call for all changes, because it reads all devices
            self.topology = attrs.evolve(self.topology, devices=tuple([self._devices[n] for n in self._present]))
            self.when_room_changed(self._devices)
        if now > self._next:
            self._next = now + DOUBTED
            self._request_measurements(now)
        return self.changes

    def _take_measurements(self, number: int, measurements: Sequence[LinkMeasurement], now: float) -> None:
        changed_pairs = []
        for measurement in measurements:
            peer = measurement.peer - 1
            link = self._links.get((peer, number) if measurement.incoming else (number, peer))
            if link is not None:
                link.record(measurement, now)
                changed_pairs.append(link)
        if sum(link.update_speed(now) for link in changed_pairs):  # each of them settles
            self._update_topology()

    def _record_free_memory(self, number: int, room: Room) -> None:
        """Set the free memory of an executor. If it has changed enough, make cached plans invalid."""
        device = self._devices[number] = attrs.evolve(self._devices[number], memory_free=room.nbytes)
        planned_bytes = self._planned_room[number]
        if (
            planned_bytes is None
            or _differs(room.nbytes, planned_bytes)
            or (room.short and room.nbytes < LESS * planned_bytes)
        ):
            fields = {"device": device.id, "before": planned_bytes, "now": room.nbytes}
            _log.info("the free memory of an executor has changed, programs are planned again", **fields)
            self._planned_room[number] = room.nbytes
            self.changes += 1

    def _request_measurements(self, now: float) -> None:
        for (source, target), link in self._links.items():
            if link.is_due(now):
                link.last_observed = now
                self._relays[source].send(MeasureLink(target + 1))
