"""OpenTelemetry: spans of plans, submissions, uploads, transfers and recovery, and metrics.

Every client and server imports this module, so it imports OpenTelemetry only if it is configured.

- `telemetry`: tracers and meters of the program's own OpenTelemetry, or for the collector in
  `OTEL_EXPORTER_OTLP_ENDPOINT`.
- `client_observer`, `server_observer`: convert events to spans and metrics.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from djinn.hooks import Observer

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")
_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def exports() -> bool:
    """Return True if the environment names a collector and does not disable OpenTelemetry."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not off and any(os.environ.get(name) for name in _ENDPOINTS)


@hookimpl
def djinn_register_observers() -> Iterable[Observer]:
    """Register observers if the program has configured OpenTelemetry or the environment names a collector."""
    exporting = exports()
    if "opentelemetry.trace" not in sys.modules and not exporting:
        return []
    from djinn_observability.opentelemetry.client_observer import ClientObserver
    from djinn_observability.opentelemetry.server_observer import ServerObserver
    from djinn_observability.opentelemetry.telemetry import check_exporter, collector_telemetry, program_telemetry

    own = program_telemetry()
    if not exporting:
        return [ClientObserver(lambda _: own)] if own is not None else []
    check_exporter()
    return [ClientObserver(lambda service: own or collector_telemetry(service)), ServerObserver(collector_telemetry)]
