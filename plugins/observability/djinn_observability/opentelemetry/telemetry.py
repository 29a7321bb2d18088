"""Tracers and meters, and helpers for the observers of clients and servers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import attrs
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from djinn.errors import ConfigurationError

SUBMIT: Final = {"rpc.system.name": "djinn", "rpc.method": "djinn.Executor/Submit"}
# Seconds: from a local decode step to a training step.
DURATIONS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SCOPE: Final = "djinn"


def _nothing() -> None:
    """Do nothing: the program exports its telemetry itself."""


@attrs.frozen
class Telemetry:
    """Traces and metrics of a process.

    Attributes:
        flush: exports pending data, for processes that may be killed.
    """

    tracer: Tracer
    meter: Meter
    flush: Callable[[], None] = _nothing

    def span(
        self,
        name: str,
        seconds: float,
        attributes: Mapping[str, Any],
        *,
        parent: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
        ended: float = 0.0,
    ) -> None:
        """Export a span of `seconds` that ended at `ended`, in seconds since 1970 (0 means now)."""
        end = int(ended * 1e9) or time.time_ns()
        began = end - int(seconds * 1e9)
        end_span(self.tracer.start_span(name, parent, kind, dict(attributes), start_time=began), error, end)

    def histogram(self, name: str, about: str) -> metrics.Histogram:
        """Create a histogram of durations in seconds."""
        return self.meter.create_histogram(
            name, unit="s", description=about, explicit_bucket_boundaries_advisory=DURATIONS
        )


def end_span(span: Span, error: str = "", end: int | None = None) -> None:
    """End a span at `end`, in nanoseconds since 1970 (None means now). If `error` is not empty, mark the span as failed."""
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(end)


def program_telemetry() -> Telemetry | None:
    """Return tracer and meter of the providers that the program has set, or None if it has set none."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return Telemetry(trace.get_tracer(_SCOPE), metrics.get_meter(_SCOPE))


def check_exporter() -> None:
    """Check that events can be exported, without importing the exporter, which is slow.

    Raises:
        ConfigurationError: the SDK or the exporter is not installed.
    """
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        try:
            spec = find_spec(name)
        except ImportError:  # of a package around it
            spec = None
        if spec is None:
            raise ConfigurationError(
                f"the environment names a collector of OpenTelemetry, and {name} is not installed: "
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or set OTEL_SDK_DISABLED=true"
            )


def collector_telemetry(service: str) -> Telemetry:
    """Return tracer and meter that export to the collector in the environment, by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    resource = Resource.create({**attributes, "process.pid": os.getpid()})
    traces = TracerProvider(resource=resource)
    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    metrics = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)

    def flush() -> None:
        traces.force_flush()
        metrics.force_flush()

    return Telemetry(traces.get_tracer(_SCOPE), metrics.get_meter(_SCOPE), flush)
