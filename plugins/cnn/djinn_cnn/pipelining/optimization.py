"""Programs that follow each other and know nothing of each other: more devices finish more of them."""

from __future__ import annotations

import math
from typing import Final

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_cnn.pipelining.state import what_is_carried

# What a program takes of the client, which records it and sends it: measured offline, not at run time.
CLIENT_EACH: Final = 12e-6  # seconds an op
CLIENT_ALL: Final = 5e-4  # seconds


class Pipelining(Optimization):
    """Tells the placement policy that many inputs follow each other, and over how many devices they can be spread.

    It is faster where programs of one structure come before their predecessors were waited for, none of them takes or leaves
    anything that the next one depends on, and each takes so long that the client can keep more than one device busy.
    """

    name = "pipelining"
    tolerates_growth = True

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False: it acts over several devices only."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """The hint `pipeline`, with the number of devices; or why not."""
        refused = _why_not(context)
        if refused:
            return OptimizationResult(self.name, applied=False, reason=refused)
        busy = _devices_kept_busy(context)
        if busy < 2:
            return OptimizationResult(self.name, applied=False, reason=_too_little(context))
        following = context.stream.following
        reason = (
            f"{following} of its kind {'is' if following == 1 else 'are'} under way and it depends on none of them: "
            f"{busy} devices work on successive inputs"
        )
        return OptimizationResult(
            self.name, applied=True, reason=reason, rewrite=Rewrite(hints={"pipeline": (busy,)}, by_turn=True)
        )


def _why_not(context: OptimizationContext) -> str:
    if len(context.topology.devices) < 2:
        return "there is one device"
    if not context.stream.following:
        return "nothing of its kind is under way: each result was waited for"
    return what_is_carried(context)


def _seconds(context: OptimizationContext) -> float:
    """Time of the program on the quickest device."""
    rows = context.costs.by_device.values()
    return min((math.fsum([row[node].seconds for node in context.plan.nodes]) for row in rows), default=0.0)


def _client(context: OptimizationContext) -> float:
    return CLIENT_ALL + CLIENT_EACH * len(context.graph.nodes)


def _devices_kept_busy(context: OptimizationContext) -> int:
    return min(len(context.topology.devices), int(_seconds(context) / _client(context)))


def _too_little(context: OptimizationContext) -> str:
    took, recorded = _seconds(context) * 1e3, _client(context) * 1e3
    return f"it takes {took:.3g} ms, and {recorded:.3g} ms to record: one device does what the client asks for"
