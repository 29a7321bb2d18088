"""The metrics of `/metrics`: each is declared once here, and exported in the format of Prometheus.

Names follow the conventions of Prometheus: base units, `_total` for counters. They are also the names in reports of
servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import attrs
import prometheus_client
from prometheus_client import exposition
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from djinn.hooks import ServerMetrics, djinn_version
from djinn_core.wire.executor_reports import Distribution, ExecutorMetrics

Labels = tuple[str, ...]


@attrs.frozen
class Metric:
    """Declaration of a metric.

    Attributes:
        name: name in reports, without the prefix of the process and without the `_total` of counters.
        text: help text.
        labels: names of the labels, without the labels of the executor.
    """

    name: str
    text: str
    labels: Labels = ()


GATEWAY_COUNTERS: Final = (
    Metric("connections", "Connections that were made"),
    Metric("unauthenticated_dropped", "Unauthenticated connections that were closed to make room for others"),
    Metric("relays", "Connections that were relayed to an executor"),
    Metric("refusals", "Connections that were refused, by reason", ("reason",)),
    Metric("admissions", "Clients that were let in", ("tenant",)),
    Metric("assignments", "Sessions that were assigned to an executor, by policy", ("policy",)),
    Metric("assignment_refusals", "Sessions that an assignment policy refused", ("policy",)),
    Metric(
        "assignment_failures",
        "Decisions of a policy that failed, so that the least loaded executor was taken",
        ("policy",),
    ),
)
GATEWAY_GAUGES: Final = (
    Metric("uptime_seconds", "Seconds since the gateway started"),
    Metric("ready", "Whether clients find an executor"),
    Metric("draining", "1 while the gateway admits no further clients"),
    Metric("unauthenticated_connections", "Connections that have not authenticated yet"),
    Metric("tenants", "Tenants with a valid token"),
)
COUNTERS: Final = (
    Metric("restarts", "Restarts of the executor"),
    Metric("assigned_sessions", "Sessions that were assigned to the executor"),
    Metric("sessions_started", "Sessions that began"),
    Metric("sessions_ended", "Sessions that ended"),
    Metric("sessions_resumed", "Sessions that went on over another connection"),
    Metric("sessions_closed", "Sessions that the server ended, by reason", ("reason",)),
    Metric("sessions_recovered", "Sessions that were recovered from their journals"),
    Metric("recovery_failures", "Sessions that could not be recovered"),
    Metric("replayed_frames", "Messages of journals that were replayed"),
    Metric("journal_snapshots", "Journals that were replaced by a snapshot"),
    Metric("messages", "Received messages, by type", ("type",)),
    Metric("submissions", "Submissions that were answered"),
    Metric("submissions_refused", "Submissions that could not be run at all"),
    Metric("submissions_stopped", "Submissions that were cancelled"),
    Metric("cancel_requests", "Requests of clients to cancel submissions"),
    Metric("submission_yields", "Submissions that paused for another session"),
    Metric("runs_ahead", "Submissions that had begun to run ahead when they arrived"),
    Metric("runs_ahead_dropped", "Runs ahead of submissions that did not arrive"),
    Metric("ops", "Ops of all submissions"),
    Metric("native_ops", "Ops that the server's native library replayed"),
    Metric("appended_bytes", "Bytes that programs appended to tensors that grow, such as KV caches"),
    Metric("append_copied_bytes", "Bytes that appends copied because a tensor had no free capacity"),
    Metric("op_failures", "Ops that failed, by cause", ("cause",)),
    Metric("poisoned_results", "Values that a client fetched and that a failed op had left undefined"),
    Metric("described_values", "Values whose metadata a client asked for because it could not infer it"),
    Metric("layout_corrections", "Results that were copied to the layout that a client had predicted"),
    Metric("fetched_tensors", "Tensors sent to clients"),
    Metric("fetched_bytes", "Bytes of tensors sent to clients"),
    Metric("received_bytes", "Bytes of buffers received with messages"),
    Metric("queue_seconds", "Seconds that submissions waited for the device"),
    Metric("decode_seconds", "Seconds of decoding submissions"),
    Metric("device_seconds", "Seconds that the device worked, by its own clock"),
    Metric("encode_seconds", "Seconds of preparing results"),
    Metric("cpu_seconds", "Processor seconds of the process"),
    Metric("tickets_refused", "Connections without a valid ticket"),
    Metric("quota_refusals", "Sessions and submissions refused because of the tenant's quota"),
    Metric("template_cache_hits", "Submissions whose template was in the session's cache"),
    Metric("template_cache_misses", "Templates that were new to a session"),
    Metric("templates_compiled", "Templates that no session of the executor had compiled before"),
    Metric("template_requests", "Templates that were requested from clients"),
    Metric("template_prepare_seconds", "Seconds of preparing new templates"),
    Metric("compilations", "Attempts to compile a template"),
    Metric("compilation_failures", "Attempts to compile a template that raised an error"),
    Metric("compilation_seconds", "Seconds that compilers took"),
    Metric("compilations_unused", "Compiled templates that were dropped: wrong, no faster, or never run again"),
    Metric("compiled_runs", "Runs of templates in which compiled code took the place of ops"),
    Metric("graph_captures", "Graphs that were recorded"),
    Metric("graphs_unused", "Recorded templates that were dropped: wrong, no faster, or never run again"),
    Metric("graph_runs", "Runs of templates in which a graph took the place of ops"),
    Metric("result_cache_hits", "Runs that were given the results of an equal run"),
    Metric("result_cache_prefix_hits", "Runs that computed only the tokens behind a prefix of an earlier run"),
    Metric("result_cache_misses", "Runs that were looked up in the result cache without a result"),
    Metric("result_cache_evictions", "Cached results that were removed to keep the budget"),
    Metric("batches", "Runs of a template for several sessions at once"),
    Metric("batched_submissions", "Submissions that ran in a batch"),
    Metric("batched_products", "Products that were computed for several sessions at once"),
    Metric("batched_rows", "Row-wise instructions that were run for several sessions at once"),
    Metric("evictions", "Values that were evicted to make room"),
    Metric("spills", "Values that were written to the spill space"),
    Metric("spilled_bytes", "Bytes written to the spill space"),
    Metric("restores", "Evicted values that were read back"),
    Metric("restored_bytes", "Bytes of evicted values that were read back"),
    Metric("dropped_weights", "Values that were evicted without a spill, because their weight file can be read again"),
    Metric("reread_bytes", "Bytes of these values that were read again"),
    Metric("memory_refusals", "Allocations that failed for lack of memory"),
    Metric("memory_pressure_changes", "How often each level of memory pressure was entered", ("level",)),
    Metric("store_hits", "Weights that the store had when a client offered them"),
    Metric("store_hit_bytes", "Bytes of these weights, which clients did not send"),
    Metric("store_misses", "Weights that the store lacked when a client offered them"),
    Metric("store_evictions", "Weights that were removed from the store to make room"),
    Metric("weight_reads", "Tensors that the executor read itself, from addresses that clients named"),
    Metric("weight_read_bytes", "Bytes of tensors that the executor read itself"),
    Metric("shared_weight_hits", "Tensors that were shared with another session instead of read"),
    Metric("shared_weight_hit_bytes", "Bytes of tensors that were shared with another session instead of read"),
    Metric("peer_transfers_sent", "Transfers of values to other executors of a pool"),
    Metric("peer_transfers_received", "Transfers of values from other executors of a pool"),
    Metric("peer_sent_bytes", "Bytes sent to other executors of a pool"),
)
GAUGES: Final = (
    Metric("up", "1 if the executor reports"),
    Metric("device_memory_bytes", "Memory of the device"),
    Metric("device_memory_free_bytes", "Free memory of the device"),
    Metric("device_utilization_ratio", "Share of recent time in which the device computed, reported by its driver"),
    Metric("device_temperature_celsius", "Temperature of the device, reported by its driver"),
    Metric("device_threads", "Threads that an op may use"),
    Metric("sessions", "Sessions of the executor"),
    Metric("oldest_session_seconds", "Age of the oldest session"),
    Metric("largest_session_memory_bytes", "Memory of the largest session"),
    Metric("busy_ratio", "Share of the last seconds in which the executor ran programs"),
    Metric("beginning_sessions", "Assigned sessions that have not begun"),
    Metric("values", "Live values"),
    Metric("memory_bytes", "Bytes of live values"),
    Metric("poisoned_values", "Live values that a failed op left undefined"),
    Metric("threads", "Threads of the process"),
    Metric("resident_memory_bytes", "Resident memory of the process"),
    Metric("open_fds", "Open file descriptors of the process"),
    Metric("waiting_sessions", "Sessions that wait for the device"),
    Metric("longest_wait_seconds", "Longest time that a session has waited for the device"),
    Metric("phase_sessions", "Sessions by the phase of their last program", ("phase",)),
    Metric("templates", "Templates that sessions keep"),
    Metric("template_instructions", "Ops of the templates that sessions keep"),
    Metric("compiled_templates", "Templates that run compiled"),
    Metric("compiling_templates", "Templates that a compiler works on, or whose compiled form is being tried"),
    Metric("recorded_templates", "Templates that run as graphs"),
    Metric("recorded_graphs", "Recorded graphs of templates, one for each set of weights"),
    Metric("recorded_graph_bytes", "Bytes of device memory that graphs keep"),
    Metric("result_cache_entries", "Runs whose results are cached"),
    Metric("result_cache_bytes", "Bytes of cached results"),
    Metric("batch_weight_bytes", "Bytes of copies of weights that batches are computed with"),
    Metric("memory_limit_bytes", "Bytes that sessions may hold in memory together"),
    Metric("memory_reserve_bytes", "Part of the memory limit that is reserved for temporary memory of ops"),
    Metric("memory_peak_bytes", "The most bytes of values that were in memory at a time"),
    Metric("process_memory_peak_bytes", "The most bytes that values and ops took of the process's memory"),
    Metric("memory_pressure_level", "Memory pressure: 0 none, 1 a warning, 2 values were evicted"),
    Metric("value_bytes", "Bytes of the sessions' values, by kind of value", ("kind",)),
    Metric("kv_cache_bytes", "Bytes of live KV caches"),
    Metric("kv_cache_pinned_bytes", "Bytes of KV caches that clients have pinned in memory"),
    Metric("evicted_bytes", "Bytes of live values that are evicted"),
    Metric("memory_shared_bytes", "Bytes of weights that several sessions share, on executors with a memory limit"),
    Metric("spill_bytes", "Bytes in the spill space"),
    Metric("idle_bytes", "Bytes of values that idle sessions have in the host's memory or on disk"),
    Metric("store_weights", "Weights that are kept on disk"),
    Metric("shared_weight_bytes", "Bytes of tensors that the executor read itself and no session has written"),
    Metric("store_bytes", "Bytes of weights that are kept on disk"),
    Metric("store_limit_bytes", "Bytes of weights that may be kept on disk"),
    Metric("disk_bytes", "Bytes of journals and spilled values on disk"),
    Metric("journals", "Sessions that have a journal"),
    Metric("journal_bytes", "Bytes of journals"),
    Metric("peer_pending_bytes", "Bytes sent to other executors and not acknowledged yet"),
)
DISTRIBUTIONS: Final = (
    Metric("queue_duration_seconds", "How long submissions waited for the device"),
    Metric("run_duration_seconds", "Device time of submissions"),
    Metric("request_duration_seconds", "From a submission to its answer, outside of generations", ("model",)),
    Metric("first_token_seconds", "From the prefill of a generation to its first token", ("model",)),
    Metric("token_seconds", "Time per token of a generation, without the first one", ("model",)),
)
_LABELS: Final = ("executor", "device", "tenant")
_MODELS_LIMIT: Final = 32  # of a tenant: an executor has as many, and executors that restart take new names
_OTHER_MODELS: Final = "other"


class MetricsPage(Collector):
    """Prometheus collector that queries the server at each scrape."""

    def __init__(self, metrics: Callable[[], ServerMetrics]) -> None:
        self._metrics = metrics
        self._models: dict[str, set[str]] = {}  # by tenant
        self._registry = prometheus_client.CollectorRegistry()
        for collector in (
            prometheus_client.ProcessCollector,
            prometheus_client.PlatformCollector,
            prometheus_client.GCCollector,
        ):
            collector(registry=self._registry)
        self._registry.register(self)

    def export(self, accept: str) -> tuple[bytes, str]:
        """Return the current metrics for an `Accept` header, with their content type."""
        encode, content_type = exposition.choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Any]:
        """Return no metric families, so that the registration queries no executor."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield all metric families, as `Collector.collect` does."""
        now = self._metrics()
        yield InfoMetricFamily("djinn_build", "Version of the server", value={"version": djinn_version()})
        gateway = {(): now.gateway}
        yield from _families("djinn_gateway_", CounterMetricFamily, GATEWAY_COUNTERS, (), gateway)
        yield from _families("djinn_gateway_", GaugeMetricFamily, GATEWAY_GAUGES, (), gateway)
        yield from _families("djinn_executor_", CounterMetricFamily, COUNTERS, _LABELS, now.executors)
        yield from _families("djinn_executor_", GaugeMetricFamily, GAUGES, _LABELS, now.executors)
        for metric in DISTRIBUTIONS:
            family = HistogramMetricFamily(
                f"djinn_executor_{metric.name}", metric.text, labels=(*_LABELS, *metric.labels)
            )
            for own, metered in now.executors.items():
                for row in self._limit_models(own[-1], metered.distributions.get(metric.name, ())):
                    family.add_metric((*own, *row.labels), _buckets(row), row.total)
            yield family

    def _limit_models(self, tenant: str, distributions: Sequence[Distribution]) -> Sequence[Distribution]:
        """Return histograms by model, their only label. Models after the first `_MODELS_LIMIT` share a histogram."""
        models = self._models.setdefault(tenant, set())
        totals: dict[Labels, Distribution] = {}
        for distribution in distributions:
            if len(models) < _MODELS_LIMIT:
                models.update({*distribution.labels} - {_OTHER_MODELS})
            labels = distribution.labels if models.issuperset(distribution.labels) else (_OTHER_MODELS,)
            totals[labels] = _sum(labels, [distribution, *filter(None, [totals.get(labels)])])
        return [*totals.values()]


def _families(
    prefix: str, kind: Any, metrics: Iterable[Metric], own_labels: Labels, metered: Mapping[Any, ExecutorMetrics]
) -> Iterator[Any]:
    """Yield the metric families of one kind. A counter that a process does not report is 0."""
    counts = kind is CounterMetricFamily
    for metric in metrics:
        family = kind(prefix + metric.name, metric.text, labels=(*own_labels, *metric.labels))
        for values, report in metered.items():
            if metric.labels:
                for labelled in report.labelled.get(metric.name, ()):
                    family.add_metric((*values, *labelled.labels), labelled.value)
                continue
            value = report.values.get(metric.name, 0.0 if counts and report.values.get("up", 1.0) else None)
            if value is not None:
                family.add_metric(values, value)
        yield family


def _sum(labels: Labels, parts: Sequence[Distribution]) -> Distribution:
    counts = tuple(map(sum, zip(*[distribution.counts for distribution in parts], strict=True)))
    return Distribution(parts[0].bounds, counts, sum(distribution.total for distribution in parts), labels)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return cumulative histogram buckets, as Prometheus expects."""
    return list(zip((*map(str, distribution.bounds), "+Inf"), accumulate(distribution.counts), strict=True))
