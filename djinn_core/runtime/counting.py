"""Counters for users: what was captured, sent and received."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn_core.interception.runtime_interface import port
from djinn_core.runtime.context import ClientContext
from djinn_core.runtime.stats import Stats


def counters(context: ClientContext) -> Mapping[str, int]:
    """Counters since the start or the last reset; sizes in bytes."""
    counts = {k: int(v) for k, v in attrs.asdict(context.stats).items() if k != "server_seconds"}
    for plugin in context.asked_by_size:
        counts[f"plans_for_sizes, {plugin}"] = counts["plans_for_sizes"]
    names = ("ops_captured", "bytes_sent", "bytes_received", "ops_inferred")
    return counts | {n: now - then for n, now, then in zip(names, _totals(context), context.baseline, strict=True)}


def _totals(context: ClientContext) -> tuple[int, int, int, int]:
    sent, received = context.closed
    for one in context.opened:
        sent, received = sent + one.connection.bytes_sent, received + one.connection.bytes_received
    return port.ops_captured, sent, received, port.ops_inferred


def reset_counters(context: ClientContext) -> None:
    """Start counting from zero."""
    fresh = Stats()
    for field in attrs.fields(Stats):
        setattr(context.stats, field.name, getattr(fresh, field.name))
    context.baseline = _totals(context)
