"""The optimization `recomputation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_core.planning.units import duration, size
from djinn_optimizations.recomputation.choices import ReplicaChoice, choices
from djinn_optimizations.recomputation.cone import cones

MAX_TIME_RATIO = 0.8  # maximum predicted time with replicas, as a share of the time without
MIN_GAIN_RATIO = 0.2  # seconds to save per second of recomputing: devices have other work
MIN_SEND_SHARE = 0.02  # share of the program's time that sending must take before choices are evaluated
_MARK = "djinn::mark"  # an event that the program records: the ops before it are being timed

Judge = Callable[[Sequence[ReplicaChoice], bool], ReplicaChoice]


def quickest(found: Sequence[ReplicaChoice], streaming: bool) -> ReplicaChoice:
    """Return the choice with the shortest time. If it does not save enough time, return the choice without replicas."""
    takes = [choice.interval if streaming else choice.seconds for choice in found]
    fastest = min(range(len(found)), key=lambda i: (takes[i], found[i].computing))
    seconds_saved = takes[0] - takes[fastest]
    least = max((1 - MAX_TIME_RATIO) * takes[0], MIN_GAIN_RATIO * found[fastest].computing)
    return found[fastest] if seconds_saved > least else found[0]


class Recomputation(Optimization):
    """Let a device recompute values of another device, if this is faster than a transfer."""

    name = "recomputation"
    tolerates_growth = True
    after = frozenset({"common_subexpressions", "dead_code"})
    after_placement = True

    def __init__(self, judge: Judge = quickest) -> None:
        self._judge = judge

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return replicas of ops, chosen by the predicted times of computing and sending."""
        placement = context.placement
        if placement is None:
            return self._not_applied("the program has no placement yet")
        if len(placement.devices) == 1:
            return self._not_applied("everything runs on one device")
        if context.plan.hints.get("groups"):
            return self._not_applied("concurrent groups were already divided by their transfers")
        if not hasattr(context.graph, "program") or any(n.op == _MARK for n in context.graph.nodes):
            return self._not_applied("the program records timing events, or there is no recorded program")
        cone_list = cones(context, placement)
        sending = sum(cone.sending[v] for cone in cone_list for v in cone.wanted)
        if not cone_list or sending < MIN_SEND_SHARE * _lower_bound_seconds(context):
            return self._not_applied(
                f"values that could be recomputed take only {duration(sending)} to send" if cone_list else _NOTHING
            )
        thought = choices(context, placement, cone_list)
        streaming = context.stream.following > 0 and not context.stream.carried
        choice = self._judge(thought, streaming)
        if not choice.replicas:
            return self._not_applied(_sent(thought, sending))
        kinds = f"{len(choice.replicas)} ops run on a further device as well"
        spared = (
            f"{duration(choice.computing)} of computing against {duration(choice.sending)} for {size(choice.nbytes)}"
        )
        reason = f"{kinds}: {spared}; {duration(choice.seconds)} in all, {duration(thought[0].seconds)} with it sent"
        return OptimizationResult(self.name, True, reason, Rewrite(replicas=choice.replicas))

    def _not_applied(self, reason: str) -> OptimizationResult:
        return OptimizationResult(self.name, applied=False, reason=reason)


_NOTHING = "no sent value can be computed on the device that uses it"


def _lower_bound_seconds(context: OptimizationContext) -> float:
    """Return the seconds that the program would take if all devices were always busy."""
    placement = context.placement
    rows = context.costs.by_device
    return (
        sum(rows[d.device][d.node].seconds for d in placement.decisions) / len(placement.devices) if placement else 0.0
    )


def _sent(thought: Sequence[ReplicaChoice], sending: float) -> str:
    """Return the reason why no value is recomputed."""
    if len(thought) == 1:
        return f"sent in {duration(sending)}: recomputing is not faster"
    cheapest_other = min(thought[1:], key=lambda choice: choice.seconds)
    return (
        f"sent: {size(cheapest_other.nbytes)} in {duration(cheapest_other.sending)} against {duration(cheapest_other.computing)} of computing again; "
        f"{duration(thought[0].seconds)} in all, {duration(cheapest_other.seconds)} with that"
    )
