"""OpenTelemetry: spans of plans, submissions, uploads, transfers and recovery, and metrics.

This module is imported by every client and server, so OpenTelemetry is imported where it is configured.

- `telemetry`: tracers and meters, of the program's own OpenTelemetry or for the collector that `OTEL_EXPORTER_OTLP_ENDPOINT` names.
- `client_observer`, `server_observer`: what events become.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from djinn.hooks import Observer, ServerObserver

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def exports() -> bool:
    """True if the environment names a collector, and does not switch OpenTelemetry off."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not off and any(os.environ.get(name) for name in _ENDPOINTS)


@hookimpl
def djinn_register_observers() -> Iterable[Observer]:
    """An observer where the program has configured OpenTelemetry, or the environment names a collector; otherwise none."""
    if "opentelemetry.trace" not in sys.modules and not exports():
        return []
    from djinn_observability.opentelemetry.client_observer import ClientObserver
    from djinn_observability.opentelemetry.telemetry import for_collector, of_the_program

    telemetry = of_the_program() or (for_collector("djinn-client") if exports() else None)
    return [ClientObserver(telemetry)] if telemetry is not None else []


@hookimpl
def djinn_register_server_observers() -> Iterable[ServerObserver]:
    """An observer where the environment names a collector; otherwise none."""
    if not exports():
        return []
    from djinn_observability.opentelemetry.server_observer import OpenTelemetryServerObserver
    from djinn_observability.opentelemetry.telemetry import for_collector

    return [OpenTelemetryServerObserver(for_collector)]
