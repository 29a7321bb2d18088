"""Prometheus metrics for `/metrics`, named by its conventions: base units, `_total` for counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.registry.version import djinn_version
from djinn_core.wire.executor_reports import Distribution, ExecutorMetrics, Sessions
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.pool import SupervisedExecutor
from djinn_server.request_times import ModelNames


@attrs.frozen
class ExecutorFamily:
    """Metric family of executors.

    Attributes:
        name: name in the report; a counter is shown with `_total` after it.
        text: help text.
        labels: names of its labels, without the labels common to all executor families.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()


COUNTERS: Final = (
    ExecutorFamily("sessions_started", "Sessions that began"),
    ExecutorFamily("sessions_ended", "Sessions that ended"),
    ExecutorFamily("sessions_resumed", "Sessions that went on over another connection"),
    ExecutorFamily("sessions_closed", "Sessions that the server ended, by reason", ("reason",)),
    ExecutorFamily("sessions_recovered", "Sessions that were recovered from their journals"),
    ExecutorFamily("recovery_failures", "Sessions that could not be recovered"),
    ExecutorFamily("replayed_frames", "Messages of journals that were replayed"),
    ExecutorFamily("journal_snapshots", "Journals that were replaced by a snapshot"),
    ExecutorFamily("messages", "Messages that came, by type", ("type",)),
    ExecutorFamily("submissions", "Submissions that were answered"),
    ExecutorFamily("submissions_refused", "Submissions that could not be run at all"),
    ExecutorFamily("submissions_stopped", "Submissions that were cancelled"),
    ExecutorFamily("cancel_requests", "Requests of clients to cancel submissions"),
    ExecutorFamily("submission_yields", "Submissions that let another session compute in the middle"),
    ExecutorFamily("runs_ahead", "Submissions that had run, or begun to, before they came"),
    ExecutorFamily("runs_ahead_dropped", "Runs of expected submissions that did not come"),
    ExecutorFamily("ops", "Ops of all submissions"),
    ExecutorFamily("native_ops", "Of these, ops that the library of the server replayed, not Python"),
    ExecutorFamily("appended_bytes", "Bytes that programs appended to tensors that grow, such as KV caches"),
    ExecutorFamily("append_copied_bytes", "Bytes that these appends copied because a tensor had no room"),
    ExecutorFamily("op_failures", "Ops that failed, by cause", ("cause",)),
    ExecutorFamily("poisoned_results", "Values that a client fetched and that a failed op had left undefined"),
    ExecutorFamily("described_values", "Values whose metadata a client asked for because it could not infer it"),
    ExecutorFamily("layout_corrections", "Results that were laid out anew, as a client had predicted them"),
    ExecutorFamily("fetched_tensors", "Tensors sent to clients"),
    ExecutorFamily("fetched_bytes", "Bytes of tensors sent to clients"),
    ExecutorFamily("received_bytes", "Bytes received beside messages: tensors"),
    ExecutorFamily("queue_seconds", "Seconds that submissions waited for the device"),
    ExecutorFamily("decode_seconds", "Seconds of reading submissions"),
    ExecutorFamily("device_seconds", "Seconds that the device worked, by its own clock"),
    ExecutorFamily("encode_seconds", "Seconds of getting results ready"),
    ExecutorFamily("cpu_seconds", "Processor seconds of the process"),
    ExecutorFamily("tickets_refused", "Connections without a valid ticket"),
    ExecutorFamily("quota_refusals", "Sessions and submissions refused because the tenant had used up what it may"),
    ExecutorFamily("template_cache_hits", "Submissions whose template was in the session's cache"),
    ExecutorFamily("template_cache_misses", "Templates that were new to a session"),
    ExecutorFamily("templates_compiled", "Templates that no session of the executor had compiled before"),
    ExecutorFamily("template_requests", "Templates that a client had to be asked for"),
    ExecutorFamily("template_prepare_seconds", "Seconds of making new templates runnable"),
    ExecutorFamily("compilations", "Attempts of compilers at a template"),
    ExecutorFamily("compilation_failures", "Attempts of compilers that raised an error"),
    ExecutorFamily("compilation_seconds", "Seconds that compilers took"),
    ExecutorFamily("compilations_unused", "Compiled templates that were dropped: wrong, no faster, or never run again"),
    ExecutorFamily("compiled_runs", "Runs of templates in which compiled code took the place of ops"),
    ExecutorFamily("graph_captures", "Graphs that were recorded"),
    ExecutorFamily("graphs_unused", "Recorded templates that were dropped: wrong, no faster, or never run again"),
    ExecutorFamily("graph_runs", "Runs of templates in which a graph took the place of ops"),
    ExecutorFamily("batches", "Runs of a template for several sessions at once"),
    ExecutorFamily("batched_submissions", "Submissions that were run in them"),
    ExecutorFamily("batched_products", "Products that were computed for several sessions at once"),
    ExecutorFamily("batched_rows", "Instructions next to them that were run for several sessions at once"),
    ExecutorFamily("evictions", "Values whose memory was taken to make room"),
    ExecutorFamily("spills", "Values that were written to the spill space"),
    ExecutorFamily("spilled_bytes", "Bytes written to the spill space"),
    ExecutorFamily("restores", "Evicted values that were read back"),
    ExecutorFamily("restored_bytes", "Bytes of evicted values that were read back"),
    ExecutorFamily(
        "dropped_weights",
        "Values that were evicted without being written, because they can be read again from their file",
    ),
    ExecutorFamily("reread_bytes", "Bytes of these that were read again"),
    ExecutorFamily("memory_refusals", "Allocations for which no room could be made"),
    ExecutorFamily("memory_pressure_changes", "How often each level of memory pressure was entered", ("level",)),
    ExecutorFamily("store_hits", "Weights that were in the store, so that no client had to send them"),
    ExecutorFamily("store_hit_bytes", "Bytes of weights that no client had to send"),
    ExecutorFamily("store_misses", "Weights that were not in the store"),
    ExecutorFamily("store_evictions", "Weights that were removed from the store to make room"),
    ExecutorFamily("weight_reads", "Tensors that the executor read itself, from addresses that clients named"),
    ExecutorFamily("weight_read_bytes", "Bytes of these tensors"),
    ExecutorFamily("shared_weight_hits", "Tensors that were to be read and were in memory for another session"),
    ExecutorFamily("shared_weight_hit_bytes", "Bytes of these tensors"),
    ExecutorFamily("peer_transfers_sent", "Transfers of values to other executors of a pool"),
    ExecutorFamily("peer_transfers_received", "Transfers of values from other executors of a pool"),
    ExecutorFamily("peer_sent_bytes", "Bytes sent to other executors of a pool"),
)
GAUGES: Final = (
    ExecutorFamily("values", "Live values"),
    ExecutorFamily("memory_bytes", "Bytes of live values"),
    ExecutorFamily("poisoned_values", "Live values that a failed op left undefined"),
    ExecutorFamily("threads", "Threads of the process"),
    ExecutorFamily("resident_memory_bytes", "Resident memory of the process"),
    ExecutorFamily("open_fds", "Open file descriptors of the process"),
    ExecutorFamily("waiting_sessions", "Sessions that wait for the device"),
    ExecutorFamily("longest_wait_seconds", "How long the first of them has waited"),
    ExecutorFamily("phase_sessions", "Sessions by the phase of their last program", ("phase",)),
    ExecutorFamily("templates", "Templates that sessions keep"),
    ExecutorFamily("template_instructions", "Ops of the templates that sessions keep"),
    ExecutorFamily("compiled_templates", "Templates that run compiled"),
    ExecutorFamily("compiling_templates", "Templates that a compiler works on, or whose compiled form is being tried"),
    ExecutorFamily("recorded_templates", "Templates that run as graphs"),
    ExecutorFamily("recorded_graphs", "Graphs of these templates, one for each set of weights"),
    ExecutorFamily("recorded_graph_bytes", "Bytes of device memory that graphs keep"),
    ExecutorFamily("batch_weight_bytes", "Bytes of copies of weights that batches are computed with"),
    ExecutorFamily("memory_limit_bytes", "Bytes that sessions may hold in memory together"),
    ExecutorFamily("memory_reserve_bytes", "Of these, what is left to ops beside their results"),
    ExecutorFamily("memory_peak_bytes", "The most bytes of values that were in memory at a time"),
    ExecutorFamily("process_memory_peak_bytes", "The most bytes that values and ops took of the process's memory"),
    ExecutorFamily("memory_pressure_level", "Memory pressure: 0 none, 1 a warning, 2 values were evicted"),
    ExecutorFamily("value_bytes", "Bytes of the sessions' values, by kind of value", ("kind",)),
    ExecutorFamily("kv_cache_bytes", "Bytes of live KV caches"),
    ExecutorFamily("kv_cache_pinned_bytes", "Bytes of KV caches that clients have pinned in memory"),
    ExecutorFamily("evicted_bytes", "Bytes of live values whose memory was taken"),
    ExecutorFamily(
        "memory_shared_bytes",
        "Bytes of weights that sessions of an executor with a memory limit hold more than once, and have once",
    ),
    ExecutorFamily("spill_bytes", "Bytes in the spill space"),
    ExecutorFamily("idle_bytes", "Bytes of values that idle sessions have in the host's memory or on disk"),
    ExecutorFamily("store_weights", "Weights that are kept on disk"),
    ExecutorFamily("shared_weight_bytes", "Bytes of tensors that the executor read itself and no session has written"),
    ExecutorFamily("store_bytes", "Bytes of weights that are kept on disk"),
    ExecutorFamily("store_limit_bytes", "Bytes of weights that may be kept on disk"),
    ExecutorFamily("disk_bytes", "Bytes of journals, and of values that had to make room in memory, on disk"),
    ExecutorFamily("journals", "Sessions that have a journal"),
    ExecutorFamily("journal_bytes", "Bytes of journals"),
    ExecutorFamily("peer_pending_bytes", "Bytes sent to other executors that these have not acknowledged"),
)
DISTRIBUTIONS: Final = (
    ExecutorFamily("queue_duration_seconds", "How long submissions waited for the device"),
    ExecutorFamily("run_duration_seconds", "Device time of submissions"),
    ExecutorFamily("request_duration_seconds", "From a submission to its answer, outside of generations", ("model",)),
    ExecutorFamily("first_token_seconds", "From the prefill of a generation to its first token", ("model",)),
    ExecutorFamily("token_seconds", "Time per token of a generation, without the first one", ("model",)),
)


_LABELS: Final = ("executor", "device", "tenant")
Labels = tuple[str, ...]


def exporter(context: GatewayContext) -> Callable[[str], tuple[bytes, str]]:
    """Return a function that takes an `Accept` header and returns the current metrics with their content type.

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
class _ExecutorRow:
    """An executor in the metrics: its labels, its supervision, and its report; None: it does not report."""

    labels: tuple[str, str, str]
    supervised: SupervisedExecutor
    report: Sessions | None


class _Collector:
    """A Prometheus collector: makes the metrics at each scrape."""

    def __init__(self, context: GatewayContext, families: Any) -> None:
        self._context = context
        self._families = families
        self._model_names: dict[str, ModelNames] = {}  # by tenant

    def describe(self) -> Iterable[Any]:
        """Return no families, so that registration queries no executor."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield all metric families, as `Collector.collect` does."""
        yield from self._gateway()
        rows = list(self._rows())
        yield from self._executors(rows)
        yield from self._sessions(rows)
        yield from self._balance(rows)
        yield from self._metered(rows)

    def _rows(self) -> Iterator[_ExecutorRow]:
        for tenant, pool in self._context.tenants.pools():
            for number, supervised in enumerate(pool.executors):
                yield _ExecutorRow((str(number), supervised.device_id, tenant), supervised, supervised.report())

    def _gateway(self) -> Iterator[Any]:
        context, counts = self._context, self._context.counts
        yield self._families.InfoMetricFamily(
            "djinn_build", "Version of the server", value={"version": djinn_version()}
        )
        yield self._gauge("djinn_gateway_uptime_seconds", "Since when it runs", time.monotonic() - context.since)
        yield self._gauge("djinn_gateway_ready", "Whether clients find an executor", float(context.tenants.ready))
        yield self._gauge(
            "djinn_gateway_draining", "1 while it admits no further clients", float(context.draining.is_set())
        )
        yield self._gauge(
            "djinn_gateway_unauthenticated_connections",
            "Connections that have not authenticated yet",
            len(context.unauthenticated),
        )
        yield self._gauge(
            "djinn_gateway_tenants", "Tenants that have a good token", len(context.authentication.tenants)
        )
        yield self._counter("djinn_gateway_connections", "Connections that were made", {(): counts.connections})
        dropped = {(): context.unauthenticated.dropped}
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

    def _executors(self, rows: list[_ExecutorRow]) -> Iterator[Any]:
        yield self._each("up", "Whether it reports", rows, lambda row: float(row.report is not None))
        restarts = {row.labels: row.supervised.restarts for row in rows}
        yield self._counter("djinn_executor_restarts", "How often it was started again", restarts, _LABELS)
        yield self._reported("device_memory_bytes", "Memory of the device", rows, lambda report: report.device.memory)
        yield self._reported("device_memory_free_bytes", "Of it free", rows, lambda report: report.device.memory_free)
        text = "Share of the last moments in which the device computed, by its driver"
        yield self._reported("device_utilization_ratio", text, rows, lambda report: report.device.utilization)
        text = "Temperature of the device, by its driver"
        yield self._reported("device_temperature_celsius", text, rows, lambda report: report.device.temperature)
        yield self._reported("device_threads", "Threads that an op may use", rows, lambda report: report.device.threads)

    def _sessions(self, rows: list[_ExecutorRow]) -> Iterator[Any]:
        yield self._reported("sessions", "Sessions that it has", rows, lambda report: len(report.sessions))
        age, memory = "Age of its oldest session", "Memory of its largest session"
        yield self._reported(
            "oldest_session_seconds", age, rows, lambda report: max([s.age for s in report.sessions] or [0.0])
        )
        yield self._reported(
            "largest_session_memory_bytes", memory, rows, lambda report: max([s.memory for s in report.sessions] or [0])
        )

    def _balance(self, rows: list[_ExecutorRow]) -> Iterator[Any]:
        """Yield the assignments of sessions to executors, and the load of the executors."""
        counts = self._context.counts.assignments
        for name, text, by_policy in (
            ("assignments", "Sessions that were assigned to an executor, by policy", counts.assigned),
            ("assignment_refusals", "Sessions that an assignment policy refused", counts.refused),
            ("assignment_failures", "Decisions of a policy that failed: the least loaded was taken", counts.failed),
        ):
            found = {(policy,): number for policy, number in sorted(by_policy.items())}
            yield self._counter(f"djinn_gateway_{name}", text, found, ("policy",))
        assigned = {row.labels: row.supervised.assigned for row in rows}
        yield self._counter("djinn_executor_assigned_sessions", "Sessions that were assigned to it", assigned, _LABELS)
        text = "Share of the last seconds in which it ran programs"
        yield self._each("busy_ratio", text, rows, lambda row: row.supervised.load.busy)
        text = "Sessions that were assigned to it and have not begun"
        yield self._each("beginning_sessions", text, rows, lambda row: row.supervised.load.beginning)

    def _metered(self, rows: list[_ExecutorRow]) -> Iterator[Any]:
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
            labels = (*_LABELS, *one.labels)
            family = self._families.HistogramMetricFamily(f"djinn_executor_{one.name}", one.text, labels=labels)
            for own, metered in known:
                for seen in self._distributions(one, own, metered):
                    family.add_metric((*own, *seen.labels), _buckets(seen), seen.total)
            yield family

    def _distributions(self, family: ExecutorFamily, own: Labels, metered: ExecutorMetrics) -> Sequence[Distribution]:
        """Histograms of an executor, with a limited number of models: executors that restart take any number of new names."""
        found = metered.distributions.get(family.name, ())
        if "model" not in family.labels:
            return found
        names = self._model_names.setdefault(own[-1], ModelNames())
        by_label: dict[str, list[Distribution]] = {}
        for one in found:
            by_label.setdefault(names.label(*one.labels), []).append(one)
        return [_sum(label, parts) for label, parts in by_label.items()]

    def _each(self, name: str, text: str, rows: list[_ExecutorRow], value: Callable[[_ExecutorRow], float]) -> Any:
        family = self._families.GaugeMetricFamily(f"djinn_executor_{name}", text, labels=_LABELS)
        for row in rows:
            family.add_metric(row.labels, value(row))
        return family

    def _reported(
        self, name: str, text: str, rows: list[_ExecutorRow], value: Callable[[Sessions], float | None]
    ) -> Any:
        """Return a gauge of the reporting executors, without values that are None."""
        family = self._families.GaugeMetricFamily(f"djinn_executor_{name}", text, labels=_LABELS)
        for row in rows:
            if row.report is not None and (measured := value(row.report)) is not None:
                family.add_metric(row.labels, measured)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Any:
        return self._families.GaugeMetricFamily(name, text, value=value)

    def _counter(self, name: str, text: str, values: Mapping[Any, float], labels: tuple[str, ...] = ()) -> Any:
        family = self._families.CounterMetricFamily(name, text, labels=labels)
        for own, value in values.items():
            family.add_metric(own, value)
        return family


def _counted(family: ExecutorFamily, own: Labels, metered: ExecutorMetrics) -> Sequence[tuple[Labels, float]]:
    """Return the values of a counter by labels. Known labels without events have the value 0."""
    return _measured(family, own, metered) or ([] if family.labels else [(own, 0.0)])


def _measured(family: ExecutorFamily, own: Labels, metered: ExecutorMetrics) -> Sequence[tuple[Labels, float]]:
    if family.labels:
        return [((*own, *one.labels), one.value) for one in metered.labelled.get(family.name, ())]
    values = (metered.counters.get(family.name), metered.gauges.get(family.name))
    return [(own, value) for value in values if value is not None]


def _sum(label: str, parts: Sequence[Distribution]) -> Distribution:
    counts = tuple(map(sum, zip(*[one.counts for one in parts], strict=True)))
    return Distribution(parts[0].bounds, counts, sum(one.total for one in parts), (label,))


def _buckets(seen: Distribution) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects."""
    return list(zip((*map(str, seen.bounds), "+Inf"), accumulate(seen.counts), strict=True))
