"""Prometheus metrics for `/metrics`, named by its conventions: base units, `_total` for counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.launch.orders import Distribution, Metered, Sessions
from djinn_core.launch.version import djinn_version
from djinn_core.server.gateway.context import GatewayContext
from djinn_core.server.gateway.pool import Seat

# What executors count, and what is so now: name (after `djinn_executor_`) and what it says.
COUNTERS: Final = {
    "sessions_started": "Sessions that began",
    "sessions_ended": "Sessions that ended",
    "sessions_resumed": "Sessions that went on over another connection",
    "submissions": "Submissions that were answered",
    "ops": "Ops of all submissions",
    "op_failures": "Ops that failed",
    "submissions_stopped": "Submissions that were cancelled",
    "fetched_tensors": "Tensors sent to clients",
    "fetched_bytes": "Bytes of tensors sent to clients",
    "received_bytes": "Bytes received beside messages: tensors",
    "queue_seconds": "Seconds that submissions waited for the device",
    "decode_seconds": "Seconds of reading submissions",
    "execute_seconds": "Seconds of running submissions",
    "encode_seconds": "Seconds of getting results ready",
    "cpu_seconds": "Processor seconds of the process",
    "tickets_refused": "Connections without a valid ticket",
    "quota_refusals": "Sessions and submissions refused because the tenant had used up what it may",
}
GAUGES: Final = {
    "values": "Live values",
    "memory_bytes": "Bytes of live values",
    "threads": "Threads of the process",
    "resident_memory_bytes": "Resident memory of the process",
    "open_fds": "Open file descriptors of the process",
    "store_bytes": "Bytes of weights that are kept on disk",
    "store_limit_bytes": "Bytes of weights that may be kept on disk",
    "disk_bytes": "Bytes of journals, and of values that had to make room in memory, on disk",
}
DISTRIBUTIONS: Final = {
    "queue_duration_seconds": "How long submissions waited for the device",
    "run_duration_seconds": "How long submissions ran",
}
_LABELS: Final = ("executor", "device", "tenant")


def exporter(context: GatewayContext) -> Callable[[str], tuple[bytes, str]]:
    """A function that gives the metrics as of now, and their content type, for the value of an `Accept` header.

    Raises:
        ConfigurationError: the library is missing.
    """
    library = _library()
    registry = library.CollectorRegistry()
    library.ProcessCollector(registry=registry)
    library.PlatformCollector(registry=registry)
    library.GCCollector(registry=registry)
    registry.register(_Collector(context, library.metrics_core))

    def export(accept: str) -> tuple[bytes, str]:
        encode, content_type = library.exposition.choose_encoder(accept)
        return encode(registry), content_type

    return export


def _library() -> Any:
    try:
        import prometheus_client
        import prometheus_client.exposition
        import prometheus_client.metrics_core
    except ImportError as error:
        raise ConfigurationError(
            "the package `prometheus-client` writes metrics and is not installed: `pip install prometheus-client`, or leave "
            "out --operations-port"
        ) from error
    return prometheus_client


@attrs.frozen
class _Row:
    """One executor in the metrics: its labels, its seat, and its report if there is one."""

    labels: tuple[str, str, str]
    seat: Seat
    report: Sessions | None


class _Collector:
    """A Prometheus collector: makes the metrics at each scrape."""

    def __init__(self, context: GatewayContext, families: Any) -> None:
        self._context = context
        self._families = families

    def describe(self) -> Iterable[Any]:
        """As `Collector.describe`: nothing is asked of executors when this is registered."""
        return ()

    def collect(self) -> Iterator[Any]:
        """As `Collector.collect`."""
        yield from self._gateway()
        rows = list(self._rows())
        yield from self._executors(rows)
        yield from self._sessions(rows)
        yield from self._metered(rows)

    def _rows(self) -> Iterator[_Row]:
        for tenant, pool in self._context.tenants.pools():
            for number, seat in enumerate(pool.seats):
                yield _Row((str(number), seat.device_id, tenant), seat, seat.report())

    def _gateway(self) -> Iterator[Any]:
        seen, counts = self._context, self._context.counts
        yield self._families.InfoMetricFamily(
            "djinn_build", "Version of the server", value={"version": djinn_version()}
        )
        yield self._gauge("djinn_gateway_uptime_seconds", "Since when it runs", time.monotonic() - seen.since)
        yield self._gauge("djinn_gateway_ready", "Whether clients find an executor", float(seen.tenants.ready))
        yield self._gauge(
            "djinn_gateway_draining", "1 while it admits no further clients", float(seen.draining.is_set())
        )
        yield self._gauge(
            "djinn_gateway_unauthenticated_connections",
            "Connections that have not authenticated yet",
            len(seen.unauthenticated),
        )
        yield self._gauge("djinn_gateway_tenants", "Tenants that have a good token", len(seen.gatekeeper.tenants))
        yield self._counter("djinn_gateway_connections", "Connections that were made", {(): counts.connections})
        dropped = {(): seen.unauthenticated.dropped}
        yield self._counter(
            "djinn_gateway_unauthenticated_dropped",
            "Unauthenticated connections that were closed to make room for others",
            dropped,
        )
        yield self._counter("djinn_gateway_relays", "Connections passed on to an executor", {(): counts.relayed})
        refused = {(kind,): number for kind, number in sorted(counts.refused.items())}
        yield self._counter("djinn_gateway_refusals", "Connections that were refused, by reason", refused, ("reason",))
        admitted = {(tenant,): number for tenant, number in sorted(counts.admitted.items())}
        yield self._counter("djinn_gateway_admissions", "Clients that were let in", admitted, ("tenant",))

    def _executors(self, rows: list[_Row]) -> Iterator[Any]:
        yield self._each("up", "Whether it reports", rows, lambda row: float(row.report is not None))
        restarts = {row.labels: row.seat.restarts for row in rows}
        yield self._counter("djinn_executor_restarts", "How often it was started again", restarts, _LABELS)
        there = [row for row in rows if row.report is not None]
        yield self._each("device_memory_bytes", "Memory of the device", there, lambda row: _said(row).device.memory)
        told = [row for row in there if _said(row).device.memory_free is not None]
        free = self._each(
            "device_memory_free_bytes", "Of it free", told, lambda row: _said(row).device.memory_free or 0
        )
        yield free
        yield self._each("device_threads", "Threads that an op may use", there, lambda row: _said(row).device.threads)

    def _sessions(self, rows: list[_Row]) -> Iterator[Any]:
        there = [row for row in rows if row.report is not None]
        yield self._each("sessions", "Sessions that it has", there, lambda row: len(_said(row).sessions))
        ages: Callable[[_Row], float] = lambda row: max((s.age for s in _said(row).sessions), default=0.0)  # noqa: E731
        yield self._each("oldest_session_seconds", "Age of its oldest session", there, ages)
        largest: Callable[[_Row], float] = lambda row: max((s.memory for s in _said(row).sessions), default=0)  # noqa: E731
        yield self._each("largest_session_memory_bytes", "Memory of its largest session", there, largest)

    def _metered(self, rows: list[_Row]) -> Iterator[Any]:
        known = [(row.labels, row.report.metered) for row in rows if row.report is not None]
        for name, text in COUNTERS.items():
            found = {labels: metered.counters.get(name, 0) for labels, metered in known}
            yield self._counter(f"djinn_executor_{name}", text, found, _LABELS)
        for name, text in GAUGES.items():
            family = self._families.GaugeMetricFamily(f"djinn_executor_{name}", text, labels=_LABELS)
            for labels, metered in known:
                if name in metered.gauges:
                    family.add_metric(labels, metered.gauges[name])
            yield family
        yield self._messages(known)
        for name, text in DISTRIBUTIONS.items():
            family = self._families.HistogramMetricFamily(f"djinn_executor_{name}", text, labels=_LABELS)
            for labels, metered in known:
                if (seen := metered.distributions.get(name)) is not None:
                    family.add_metric(labels, _buckets(seen), seen.total)
            yield family

    def _messages(self, known: list[tuple[tuple[str, str, str], Metered]]) -> Any:
        text, labels = "Messages that came, by type", (*_LABELS, "type")
        found = {(*own, kind): n for own, metered in known for kind, n in sorted(metered.messages.items())}
        return self._counter("djinn_executor_messages", text, found, labels)

    def _each(self, name: str, text: str, rows: list[_Row], value: Callable[[_Row], float]) -> Any:
        family = self._families.GaugeMetricFamily(f"djinn_executor_{name}", text, labels=_LABELS)
        for row in rows:
            family.add_metric(row.labels, value(row))
        return family

    def _gauge(self, name: str, text: str, value: float) -> Any:
        return self._families.GaugeMetricFamily(name, text, value=value)

    def _counter(self, name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Any:
        family = self._families.CounterMetricFamily(name, text, labels=labels)
        for own, value in values.items():
            family.add_metric(own, value)
        return family


def _said(row: _Row) -> Sessions:
    assert row.report is not None
    return row.report


def _buckets(seen: Distribution) -> list[tuple[str, float]]:
    """As Prometheus has them: each with all that are smaller."""
    return list(zip((*map(str, seen.bounds), "+Inf"), accumulate(seen.counts), strict=True))
