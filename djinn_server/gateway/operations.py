"""Functions for operators and clients of a server: status, metrics, and ending a session."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from djinn_core.registry.version import djinn_version
from djinn_core.wire.executor_reports import ExecutorMetrics, LabelledValue
from djinn_core.wire.messages import ExecutorStatus, Killed, Status, status_facts
from djinn_server.gateway.context import GatewayContext
from djinn_server.gateway.pool import SupervisedExecutor
from djinn_server.handshake import instance
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity
from djinn_server.hookspecs.operations import ServerMetrics, WatchedServer
from djinn_server.launch.orders import End

MAX_WITH_DECISIONS: Final = 100  # sessions in a status with decisions of plans
MAX_WITH_LOGS: Final = 32  # executors in a status with log lines


def watched_server(context: GatewayContext, assignment: str) -> WatchedServer:
    """Return the functions that an operations server calls. `assignment`: name of the assignment policy."""
    return WatchedServer(
        lambda tenant: status_facts(status_of(context, assignment, tenant)),
        partial(_end_session, context),
        partial(_identify_operator, context),
        context.why_not_ready,
        partial(server_metrics, context),
    )


def _end_session(context: GatewayContext, session: str, identity: Identity) -> str:
    answer = kill_session(context, session, identity, "operations", "on a page of the server")
    return answer.reason if isinstance(answer, Denial) else ""


def _identify_operator(context: GatewayContext, credentials: Credentials, path: str) -> Identity | Denial:
    """Return the identity of a client of the operations server, as `WatchedServer.identify` does."""
    identity = context.authentication.identify(credentials)
    if path and isinstance(identity, Denial):
        context.events.emit("refused", why=identity.kind, asked=path, peer=credentials.peer, at="operations")
    return identity


def _without_decisions(executors: tuple[ExecutorStatus, ...]) -> tuple[ExecutorStatus, ...]:
    """Return the status without the plans' decisions if there are many sessions. A reply is limited to 4 MiB."""
    if sum(len(executor.sessions) for executor in executors) <= MAX_WITH_DECISIONS:
        return executors
    replace = msgspec.structs.replace
    return tuple(
        replace(executor, sessions=tuple(replace(session, decisions=()) for session in executor.sessions))
        for executor in executors
    )


def status_of(context: GatewayContext, assignment: str, tenant: str | None) -> Status:
    """Return the status for a tenant, or for the operator (None). `assignment`: name of the assignment policy."""
    age = time.monotonic() - context.since
    executors = _without_decisions(context.tenants.statuses(tenant))
    if tenant is not None or len(executors) > MAX_WITH_LOGS:
        executors = tuple(msgspec.structs.replace(executor, log=()) for executor in executors)
    least = context.tenants.least_load()
    events = context.recent.of(tenant)
    return Status(djinn_version(), os.getpid(), age, executors, *least, assignment, events, instance())


def kill_session(context: GatewayContext, session: str, identity: Identity, peer: str, means: str) -> Killed | Denial:
    """End the session whose name begins with `session`, if the client may. Return the reply, or a denial.

    `means`: how the request came, for the message to the session's client.
    """
    if identity.monitor:
        return Denial("this token is valid for watching the server only", "monitor")
    statuses = context.tenants.statuses(None if identity.sees_all else identity.tenant)
    sessions = [status for executor in statuses for status in executor.sessions]
    clients = {s.session: s.client for s in sessions if s.session.startswith(session)}
    if len(clients) != 1 or not session:
        several = f"{len(clients)} session names begin with" if clients else "no session name begins with"
        reason = f"{several} {session!r}: `djinn status --json` shows whole names"
        return Denial(reason, "no_such_session")
    ((name, client),) = clients.items()
    facts = {"session": name, "client": client, "tenant": identity.tenant, "key": identity.key}
    context.events.emit("killed", **facts, peer=peer)
    ender = "the operator of the server" if identity.sees_all else f"its owner {identity.tenant}"
    for executor in context.tenants.executors():
        executor.send(End(name, f"it was ended by {ender}, {means}"))
    return Killed(name, client)


def server_metrics(context: GatewayContext) -> ServerMetrics:
    """Return the metrics of a gateway and its executors. Request a report of each executor."""
    executors = {
        (str(number), supervised.device_id, tenant): _executor_metrics(supervised)
        for tenant, pool in context.tenants.pools()
        for number, supervised in enumerate(pool.executors)
    }
    return ServerMetrics(_gateway_metrics(context), executors)


def _gateway_metrics(context: GatewayContext) -> ExecutorMetrics:
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
        "assignments": counts.assignments["assigned"],
        "assignment_refusals": counts.assignments["refused"],
        "assignment_failures": counts.assignments["failed"],
    }
    return ExecutorMetrics(values, {name: _labelled(values) for name, values in labelled.items()})


def _labelled(values: Mapping[str, int]) -> tuple[LabelledValue, ...]:
    return tuple(LabelledValue((label,), number) for label, number in sorted(values.items()))


def _executor_metrics(supervised: SupervisedExecutor) -> ExecutorMetrics:
    """Return the metrics that an executor reports, and the metrics that the gateway measures."""
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
