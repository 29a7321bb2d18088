"""The reply to `djinn status`, for clients and for the pages of the operations listener."""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

from djinn_core.registry.version import djinn_version
from djinn_core.wire.messages import ExecutorStatus, Status
from djinn_server.gateway.context import GatewayContext
from djinn_server.handshake import instance

MOST_WITH_DECISIONS: Final = 100  # sessions
MOST_WITH_LOGS: Final = 32  # executors


def _shortened(executors: tuple[ExecutorStatus, ...]) -> tuple[ExecutorStatus, ...]:
    """Drop the decisions of plans if there are many sessions: a reply is limited to 4 MiB."""
    if sum(len(executor.sessions) for executor in executors) <= MOST_WITH_DECISIONS:
        return executors
    replace = msgspec.structs.replace
    return tuple(
        replace(executor, sessions=tuple(replace(session, decisions=()) for session in executor.sessions))
        for executor in executors
    )


def status_of(context: GatewayContext, assignment: str, tenant: str | None) -> Status:
    """Return the status for a tenant, or (None) for the operator. `assignment`: name of the assignment policy."""
    age = time.monotonic() - context.since
    executors = _shortened(context.tenants.statuses(tenant))
    if tenant is not None or len(executors) > MOST_WITH_LOGS:
        executors = tuple(msgspec.structs.replace(one, log=()) for one in executors)
    least = context.tenants.least_load()
    told = context.recent.of(tenant)
    return Status(djinn_version(), os.getpid(), age, executors, *least, assignment, told, instance())
