"""The optimization `pipelining`: spread successive, independent programs over several devices."""

from __future__ import annotations

import math
from typing import Final

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_cnn.pipelining.state import reason_to_run_in_order

# Client overhead of a program for recording and sending, measured offline.
CLIENT_SECONDS_PER_OP: Final = 12e-6  # seconds per op
CLIENT_SECONDS_PER_PROGRAM: Final = 5e-4  # seconds per program


class Pipelining(Optimization):
    """Give the placement policy a hint that independent programs follow each other: how many devices they keep busy.

    The hint has three conditions. The client submits programs of one structure before it waits for results of earlier
    programs. No program depends on state that an earlier program leaves. A program runs so long that the client, which
    records all programs, can keep several devices busy.
    """

    name = "pipelining"
    tolerates_growth = True

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return the hint `pipeline` with the number of devices, or the reason why programs are not spread."""
        reason_against = _reason_against(context)
        if reason_against:
            return OptimizationResult(self.name, applied=False, reason=reason_against)
        device_count = _devices_kept_busy(context)
        if device_count < 2:
            return OptimizationResult(self.name, applied=False, reason=_client_bound(context))
        following = context.stream.following
        reason = (
            f"{following} programs of this structure are pending, and this program depends on none of them: "
            f"{device_count} devices work on successive inputs"
        )
        return OptimizationResult(
            self.name, applied=True, reason=reason, rewrite=Rewrite(hints={"pipeline": (device_count,)}, by_turn=True)
        )


def _reason_against(context: OptimizationContext) -> str:
    if len(context.topology.devices) < 2:
        return "there is one device"
    if not context.stream.following:
        return "no program of this structure is pending: the client waited for each result"
    return reason_to_run_in_order(context)


def _seconds(context: OptimizationContext) -> float:
    """Return the predicted time of the program on the fastest device."""
    rows = context.costs.by_device.values()
    return min((math.fsum([row[node].seconds for node in context.plan.nodes]) for row in rows), default=0.0)


def _client_seconds(context: OptimizationContext) -> float:
    return CLIENT_SECONDS_PER_PROGRAM + CLIENT_SECONDS_PER_OP * len(context.graph.nodes)


def _devices_kept_busy(context: OptimizationContext) -> int:
    return min(len(context.topology.devices), int(_seconds(context) / _client_seconds(context)))


def _client_bound(context: OptimizationContext) -> str:
    device_ms, client_ms = _seconds(context) * 1e3, _client_seconds(context) * 1e3
    return f"the program takes {device_ms:.3g} ms, and the client takes {client_ms:.3g} ms to record it: one device is enough"
