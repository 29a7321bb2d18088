"""Counts and bytes that executors report of a session."""

from __future__ import annotations

from djinn_core.wire.messages import StatsReply, StatsRequest


def figures(asked, device=0):
    """Return the figures of an executor, or their sums over the executors of a router."""
    return asked.ask(StatsRequest(), StatsReply, *([device] if device else [])).values
