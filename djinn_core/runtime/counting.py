"""Counters for users: what was captured, sent and received."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn_core.interception.runtime_interface import port
from djinn_core.runtime.state import state
from djinn_core.runtime.stats import Stats


def stats() -> Mapping[str, int]:
    """Counters since the start or the last reset; sizes in bytes.

    Plugins with which plans hold for fewer sizes are named beside `plans_for_sizes`.
    """
    counts = {k: int(v) for k, v in attrs.asdict(state.stats).items() if k != "server_seconds"}
    for plugin in state.asked_by_size:
        counts[f"plans_for_sizes, {plugin}"] = counts["plans_for_sizes"]
    names = ("ops_captured", "bytes_sent", "bytes_received", "ops_inferred")
    return counts | {n: now - then for n, now, then in zip(names, _totals(), state.baseline, strict=True)}


def _totals() -> tuple[int, int, int, int]:
    sent, received = state.closed
    for one in state.opened:
        sent, received = sent + one.connection.bytes_sent, received + one.connection.bytes_received
    return port.ops_captured, sent, received, port.ops_inferred


def reset_stats() -> None:
    """Start counting from zero."""
    fresh = Stats()
    for field in attrs.fields(Stats):
        setattr(state.stats, field.name, getattr(fresh, field.name))
    state.baseline = _totals()
