"""Convert events of a client to spans and metrics. Spans of executors are children of the client's submission spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import attrs
from opentelemetry import context as current_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind

from djinn.hooks import Event, Observer
from djinn_observability.opentelemetry.telemetry import SUBMIT, Telemetry, end_span


@attrs.define
class _Uploads:
    """Uploads before the next submission, which form one span."""

    parent: Context
    began: int
    ended: int
    nbytes: int = 0
    recalled: int = 0


class ClientObserver(Observer):
    """Observer that converts a client's events to spans and metrics."""

    name = "opentelemetry"
    events = frozenset({
        "connected", "disconnected", "reconnected", "planned", "submitted", "completed", "waited", "uploaded",
    })  # fmt: skip
    processes = frozenset({"client"})

    def __init__(self, make: Callable[[str], Telemetry]) -> None:
        """`make`: returns the telemetry of a service by its name. It is called once, at the client's first event."""
        self._make = make
        self._lock = threading.Lock()
        self._spans_made: _Spans | None = None

    def observe(self, event: Event) -> None:
        """Handle an event, as `Observer.observe`."""
        self._spans().observe(event)

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """Begin the span of a submission, and return its context, as `Observer.trace_context`."""
        return self._spans().trace_context(kind, executor, number)

    def _spans(self) -> _Spans:
        with self._lock:
            if self._spans_made is None:
                self._spans_made = _Spans(self._make("djinn-client"))
            return self._spans_made


class _Spans:
    """Open spans, and metric instruments."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        meter = telemetry.meter
        self._calls = telemetry.histogram("rpc.client.call.duration", "From a submission to its reply")
        self._plans = telemetry.histogram("djinn.client.plan.duration", "Planning a program")
        self._waits = telemetry.histogram("djinn.client.wait.duration", "Waiting for a reply")
        self._breaks = telemetry.histogram("djinn.client.reconnect.duration", "Without a connection to the executor")
        self._bytes = meter.create_counter("djinn.client.upload.io", unit="By", description="Bytes of uploaded tensors")
        self._lock = threading.Lock()
        self._open_spans: dict[tuple[int, int], tuple[Span, float]] = {}
        self._uploads: _Uploads | None = None
        self._servers: list[dict[str, Any]] = [{}]

    def trace_context(self, kind: str, executor: int, number: int) -> str:
        """Begin the span of a submission, and return its context."""
        if kind != "submission":
            return _traceparent(trace.get_current_span().get_span_context())
        attributes = {**SUBMIT, **self._server(executor), "djinn.submission": number, "djinn.executor": executor}
        span = self._telemetry.tracer.start_span("djinn.submit", kind=SpanKind.CLIENT, attributes=attributes)
        self._open_spans[executor, number] = span, time.perf_counter()
        return _traceparent(span.get_span_context())

    def observe(self, event: Event) -> None:
        """Update spans and metrics by an event."""
        fields = event.fields
        if event.name == "completed":
            self._end_submission_span(fields.get("executor", 0), fields.get("submission", 0), fields)
        elif event.name == "submitted":
            self._end_uploads()
            span, _ = self._open_spans.get((fields.get("executor", 0), fields.get("submission", 0)), (None, 0.0))
            if span is not None:
                span.set_attribute("djinn.instructions", fields.get("instructions", 0))
        elif event.name == "uploaded":
            self._uploaded(fields.get("bytes", 0), fields.get("duration", 0.0), bool(fields.get("recalled")))
        elif event.name == "planned" and "duration" in fields:
            span_attributes = {"djinn.instructions": fields.get("instructions", 0)}
            self._telemetry.span("djinn.plan", fields["duration"], span_attributes)
            self._plans.record(fields["duration"])
        elif event.name == "waited" and "seconds" in fields:
            self._waits.record(fields["seconds"])
        elif event.name == "reconnected" and "duration" in fields:
            server = _address(str(fields.get("server", "")))
            self._telemetry.span("djinn.reconnect", fields["duration"], server)
            self._breaks.record(fields["duration"], server)
        elif event.name == "connected":
            self._servers = [_address(url) for url in str(fields.get("server", "")).split(", ")]
        elif event.name == "disconnected":
            self._disconnected()

    def _server(self, executor: int) -> dict[str, Any]:
        return self._servers[executor - 1] if 0 < executor <= len(self._servers) else self._servers[0]

    def _end_submission_span(self, executor: int, number: int, fields: Any) -> None:
        span, began = self._open_spans.pop((executor, number), (None, 0.0))
        if span is None:
            return
        error = "RemoteError" if fields.get("failures") else ""
        span.set_attribute("djinn.queue.duration", fields.get("queue", 0.0))
        span.set_attribute("djinn.execute.duration", fields.get("execute", 0.0))
        end_span(span, error)
        span_attributes = {**SUBMIT, **self._server(executor), **({"error.type": error} if error else {})}
        self._calls.record(time.perf_counter() - began, span_attributes)

    def _uploaded(self, nbytes: int, seconds: float, recalled: bool) -> None:
        now = time.time_ns()
        with self._lock:
            uploads = self._uploads
            if uploads is None:
                began = now - int(seconds * 1e9)
                uploads = self._uploads = _Uploads(current_context.get_current(), began, now)
            uploads.ended = now
            uploads.nbytes += nbytes
            uploads.recalled += nbytes if recalled else 0
        self._bytes.add(nbytes, {"djinn.upload.recalled": recalled})

    def _end_uploads(self) -> None:
        with self._lock:
            uploads, self._uploads = self._uploads, None
        if uploads is None:
            return
        span_attributes = {"djinn.upload.size": uploads.nbytes, "djinn.upload.recalled_size": uploads.recalled}
        span = self._telemetry.tracer.start_span(
            "djinn.upload", uploads.parent, SpanKind.CLIENT, span_attributes, start_time=uploads.began
        )
        span.end(uploads.ended)

    def _disconnected(self) -> None:
        self._end_uploads()
        while self._open_spans:
            _, (span, _) = self._open_spans.popitem()
            end_span(span, "SessionLost")
        self._telemetry.flush()


def _traceparent(span: SpanContext) -> str:
    """Return the W3C Trace Context header `traceparent` (version 00) of a span, or an empty text without a span."""
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


def _address(url: str) -> dict[str, Any]:
    """Return the attributes of a server's address, by the conventions of OpenTelemetry."""
    parts = urlsplit(url)
    if not parts.hostname:
        return {"server.address": parts.path or url}
    return {"server.address": parts.hostname, **({"server.port": parts.port} if parts.port else {})}
