"""The optimization `pipelining`: spread successive, independent programs over several devices."""

from __future__ import annotations

import math
from typing import Final

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_cnn.pipelining.state import what_is_carried

# Client overhead of a program for recording and sending, measured offline.
CLIENT_EACH: Final = 12e-6  # seconds per op
CLIENT_ALL: Final = 5e-4  # seconds per program


class Pipelining(Optimization):
    """Tell the placement policy that independent programs follow each other, and how many devices they can keep busy.

    The hint helps under three conditions. The client submits programs of one structure before it waits for earlier
    ones. No program depends on the state that the previous program leaves. Each program runs long enough that the
    client can keep several devices busy.
    """

    name = "pipelining"
    tolerates_growth = True

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return the hint `pipeline` with the number of devices, or the reason why programs are not spread."""
        refused = _why_not(context)
        if refused:
            return OptimizationResult(self.name, applied=False, reason=refused)
        busy = _devices_kept_busy(context)
        if busy < 2:
            return OptimizationResult(self.name, applied=False, reason=_client_bound(context))
        following = context.stream.following
        reason = (
            f"{following} of its kind {'is' if following == 1 else 'are'} pending, and this program depends on none of them: "
            f"{busy} devices work on successive inputs"
        )
        return OptimizationResult(
            self.name, applied=True, reason=reason, rewrite=Rewrite(hints={"pipeline": (busy,)}, by_turn=True)
        )


def _why_not(context: OptimizationContext) -> str:
    if len(context.topology.devices) < 2:
        return "there is one device"
    if not context.stream.following:
        return "no program of its structure is pending: the client waited for each result"
    return what_is_carried(context)


def _seconds(context: OptimizationContext) -> float:
    """Return the predicted time of the program on the fastest device."""
    rows = context.costs.by_device.values()
    return min((math.fsum([row[node].seconds for node in context.plan.nodes]) for row in rows), default=0.0)


def _client(context: OptimizationContext) -> float:
    return CLIENT_ALL + CLIENT_EACH * len(context.graph.nodes)


def _devices_kept_busy(context: OptimizationContext) -> int:
    return min(len(context.topology.devices), int(_seconds(context) / _client(context)))


def _client_bound(context: OptimizationContext) -> str:
    took, client = _seconds(context) * 1e3, _client(context) * 1e3
    return f"the program takes {took:.3g} ms, and the client takes {client:.3g} ms to record it: one device is enough"
