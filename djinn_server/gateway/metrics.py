"""Present metrics of a server, which an operations server shows: those of the gateway, and of each executor."""

from __future__ import annotations

import time
from collections.abc import Mapping

from djinn_core.wire.executor_reports import ExecutorMetrics, LabelledValue
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.pool import SupervisedExecutor
from djinn_server.hookspecs.operations import ServerMetrics


def server_metrics(context: GatewayContext) -> ServerMetrics:
    """Return the metrics of a gateway and of its executors, which it asks."""
    executors = {
        (str(number), supervised.device_id, tenant): _executor(supervised)
        for tenant, pool in context.tenants.pools()
        for number, supervised in enumerate(pool.executors)
    }
    return ServerMetrics(_gateway(context), executors)


def _gateway(context: GatewayContext) -> ExecutorMetrics:
    counts = context.counts
    values: dict[str, float] = {
        "connections": counts.connections,
        "unauthenticated_dropped": context.unauthenticated.dropped,
        "relays": counts.relayed,
        "uptime_seconds": time.monotonic() - context.since,
        "ready": context.tenants.ready,
        "draining": context.draining.is_set(),
        "unauthenticated_connections": len(context.unauthenticated),
        "tenants": len(context.authentication.tenants),
    }
    labelled = {
        "refusals": counts.refused,
        "admissions": counts.admitted,
        "assignments": counts.assignments.assigned,
        "assignment_refusals": counts.assignments.refused,
        "assignment_failures": counts.assignments.failed,
    }
    return ExecutorMetrics(values, {name: _labelled(values) for name, values in labelled.items()})


def _labelled(values: Mapping[str, int]) -> tuple[LabelledValue, ...]:
    return tuple(LabelledValue((label,), number) for label, number in sorted(values.items()))


def _executor(supervised: SupervisedExecutor) -> ExecutorMetrics:
    """Return what the executor reports, if it does, and what the gateway knows of it."""
    report, load = supervised.report(), supervised.meter.load()
    values: dict[str, float] = {
        "up": float(report is not None),
        "restarts": supervised.restarts,
        "assigned_sessions": supervised.meter.assigned,
        "busy_ratio": load.busy,
        "beginning_sessions": load.beginning,
    }
    if report is None:
        return ExecutorMetrics(values)
    device, metered = report.device, report.metered
    about = {
        "device_memory_bytes": device.memory,
        "device_memory_free_bytes": device.memory_free,
        "device_utilization_ratio": device.utilization,
        "device_temperature_celsius": device.temperature,
        "device_threads": device.threads,
        "sessions": len(report.sessions),
        "oldest_session_seconds": max([session.age for session in report.sessions], default=0.0),
        "largest_session_memory_bytes": max([session.memory for session in report.sessions], default=0),
    }
    values |= {name: value for name, value in about.items() if value is not None}
    return ExecutorMetrics(metered.values | values, metered.labelled, metered.distributions)
