"""Prometheus metrics for `/metrics`, named by its conventions: base units, `_total` for counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.launch.version import djinn_version
from djinn_core.server.gateway.context import GatewayContext
from djinn_core.server.gateway.executor_families import COUNTERS, DISTRIBUTIONS, GAUGES, ExecutorFamily
from djinn_core.server.gateway.pool import Seat
from djinn_core.wire.executor_reports import Distribution, Metered, Sessions

_LABELS: Final = ("executor", "device", "tenant")
Labels = tuple[str, ...]


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
        yield from self._balance(rows)
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

    def _balance(self, rows: list[_Row]) -> Iterator[Any]:
        """Assignments of sessions to executors, and the load of these."""
        counts = self._context.counts.assignments
        for name, text, by_policy in (
            ("assignments", "Sessions that were assigned to an executor, by policy", counts.assigned),
            ("assignment_refusals", "Sessions that an assignment policy refused", counts.refused),
            ("assignment_failures", "Decisions of a policy that failed: the least loaded was taken", counts.failed),
        ):
            found = {(policy,): number for policy, number in sorted(by_policy.items())}
            yield self._counter(f"djinn_gateway_{name}", text, found, ("policy",))
        assigned = {row.labels: row.seat.assigned for row in rows}
        yield self._counter("djinn_executor_assigned_sessions", "Sessions that were assigned to it", assigned, _LABELS)
        text = "Share of the last seconds in which it ran programs"
        yield self._each("busy_ratio", text, rows, lambda row: row.seat.load.busy)
        text = "Sessions that were assigned to it and have not begun"
        yield self._each("beginning_sessions", text, rows, lambda row: row.seat.load.beginning)

    def _metered(self, rows: list[_Row]) -> Iterator[Any]:
        known = [(row.labels, row.report.metered) for row in rows if row.report is not None]
        for one in COUNTERS:
            found = {labels: value for own, metered in known for labels, value in _counted(one, own, metered)}
            yield self._counter(f"djinn_executor_{one.name}", one.text, found, (*_LABELS, *one.labels))
        for one in GAUGES:
            labels = (*_LABELS, *one.labels)
            family = self._families.GaugeMetricFamily(f"djinn_executor_{one.name}", one.text, labels=labels)
            for own, metered in known:
                for of, value in _measured(one, own, metered):
                    family.add_metric(of, value)
            yield family
        for one in DISTRIBUTIONS:
            family = self._families.HistogramMetricFamily(f"djinn_executor_{one.name}", one.text, labels=_LABELS)
            for own, metered in known:
                if (seen := metered.distributions.get(one.name)) is not None:
                    family.add_metric(own, _buckets(seen), seen.total)
            yield family

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


def _counted(family: ExecutorFamily, own: Labels, metered: Metered) -> Sequence[tuple[Labels, float]]:
    """Values of a counter by all of their labels: 0 for what never happened, as far as its labels are known."""
    return _measured(family, own, metered) or ([] if family.labels else [(own, 0.0)])


def _measured(family: ExecutorFamily, own: Labels, metered: Metered) -> Sequence[tuple[Labels, float]]:
    if family.labels:
        return [((*own, *one.labels), one.value) for one in metered.labelled.get(family.name, ())]
    values = (metered.counters.get(family.name), metered.gauges.get(family.name))
    return [(own, value) for value in values if value is not None]


def _said(row: _Row) -> Sessions:
    assert row.report is not None
    return row.report


def _buckets(seen: Distribution) -> list[tuple[str, float]]:
    """As Prometheus has them: each with all that are smaller."""
    return list(zip((*map(str, seen.bounds), "+Inf"), accumulate(seen.counts), strict=True))
