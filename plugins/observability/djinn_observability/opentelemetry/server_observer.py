"""Convert events of a gateway or an executor to spans and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from djinn.hooks import Event, Observer
from djinn_observability.opentelemetry.telemetry import SUBMIT, Telemetry

_NAMES = {"tenant": "djinn.tenant", "device": "djinn.device", "session": "djinn.session.id", "client": "djinn.client"}
_MEASURED = ("djinn.tenant", "djinn.device")  # attributes with few distinct values, for metrics


class ServerObserver(Observer):
    """Observer that converts events of a gateway or an executor to spans and metrics."""

    name = "opentelemetry_server"
    events = frozenset({
        "admitted", "refused", "executor_died", "executor_restarted", "stopped",
        "session_began", "session_ended", "completed", "transferred",
    })  # fmt: skip
    processes = frozenset({"gateway", "executor"})

    def __init__(self, make: Callable[[str], Telemetry]) -> None:
        """`make`: returns the telemetry of a service by name. It is called at the first event, which names the service."""
        self._make = make
        self._instruments: _Instruments | None = None

    def observe(self, event: Event) -> None:
        """Handle an event, as `Observer.observe`."""
        if self._instruments is None:
            self._instruments = _Instruments(self._make(f"djinn-{event.process}"))
        instruments, fields = self._instruments, event.fields
        if event.name == "completed":
            instruments.completed(event)
        elif event.name == "transferred":
            instruments.transferred(event)
        elif event.name in {"admitted", "refused"}:
            instruments.answered(event.name, fields)
        elif event.name in {"executor_died", "executor_restarted"}:
            instruments.restarted(event)
        elif event.name == "session_began" and fields.get("recovered"):
            instruments.replacements.add(1, _attributes(fields, _MEASURED))
        elif event.name in {"session_ended", "stopped"}:
            instruments.telemetry.flush()


class _Instruments:
    """Metric instruments of a process, and handlers of its events."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry, meter = telemetry, telemetry.meter
        self._calls = telemetry.histogram("rpc.server.call.duration", "From reading a submission to its results")
        self._queue = telemetry.histogram("djinn.executor.queue.duration", "Submissions waiting for the device")
        self._clients = meter.create_counter("djinn.gateway.clients", unit="{client}", description="Clients answered")
        self._transferred_bytes = meter.create_counter(
            "djinn.executor.transfer.io", unit="By", description="Bytes from others"
        )
        self._deaths = meter.create_counter("djinn.gateway.executor.deaths", unit="{process}")
        self.replacements = meter.create_counter("djinn.executor.sessions.recovered", unit="{session}")
        self._death_times: dict[str, float] = {}  # by device

    def completed(self, event: Event) -> None:
        """Record an answered submission."""
        fields = event.fields
        queue = fields.get("queue", 0.0)
        total = queue + sum(fields.get(name, 0.0) for name in ("decode", "duration", "encode"))
        error = "RemoteError" if fields.get("failures") else ""
        parent = _parent(fields)
        if parent is not None:
            about = {**SUBMIT, **_attributes(fields), "djinn.submission": fields.get("submission", 0)}
            for part in ("queue", "decode", "encode"):
                about[f"djinn.{part}.duration"] = fields.get(part, 0.0)
            about["djinn.execute.duration"] = fields.get("duration", 0.0)
            self.telemetry.span(
                "djinn.execute", total, about, parent=parent, kind=SpanKind.SERVER, error=error, ended=event.seconds
            )
        measurements = _attributes(fields, _MEASURED)
        self._queue.record(queue, measurements)
        self._calls.record(total, {**SUBMIT, **measurements, **({"error.type": error} if error else {})})

    def transferred(self, event: Event) -> None:
        """Record that values from another executor have arrived, or that their transfer failed."""
        fields = event.fields
        parent = _parent(fields)
        if parent is not None:
            about = {
                **_attributes(fields),
                "djinn.transfer.size": fields["bytes"],
                "djinn.transfer.source": fields["source"],
            }
            error = "SessionLost" if fields.get("error") else ""
            self.telemetry.span(
                "djinn.transfer", fields["duration"], about, parent=parent, error=error, ended=event.seconds
            )
        self._transferred_bytes.add(fields.get("bytes", 0), _attributes(fields, _MEASURED))

    def answered(self, name: str, fields: Mapping[str, Any]) -> None:
        """Record that the gateway accepted or refused a client."""
        about = {"error.type": str(fields.get("why", ""))} if name == "refused" else {}
        self._clients.add(1, {"djinn.outcome": name, **about})

    def restarted(self, event: Event) -> None:
        """Record that an executor died or was replaced. The time from death to replacement is a span."""
        device = str(event.fields.get("device", ""))
        if event.name == "executor_died":
            self._death_times[device] = event.seconds
            self._deaths.add(1, _attributes(event.fields, _MEASURED))
        elif device in self._death_times:
            seconds = event.seconds - self._death_times.pop(device)
            self.telemetry.span(
                "djinn.executor.restart", seconds, _attributes(event.fields), parent=Context(), ended=event.seconds
            )


def _parent(fields: Mapping[str, Any]) -> Context | None:
    """Return the context of the client's span, or None if the client does not trace."""
    trace = fields.get("trace")
    return TraceContextTextMapPropagator().extract({"traceparent": trace}, Context()) if trace else None


def _attributes(fields: Mapping[str, Any], names: tuple[str, ...] = tuple(_NAMES.values())) -> dict[str, Any]:
    attributes = {name: fields[field] for field, name in _NAMES.items() if fields.get(field) is not None}
    return {name: value for name, value in attributes.items() if name in names}
