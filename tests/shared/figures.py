"""Counts and bytes that executors report of a session."""

from __future__ import annotations

from djinn_core.wire.messages import StatsReply, StatsRequest


def figures(asked, device=0):
    """Of one executor, or of the executors of a router: the sums of a pool's."""
    return asked.ask(StatsRequest(), StatsReply, *([device] if device else [])).values
