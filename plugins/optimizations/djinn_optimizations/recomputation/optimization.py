"""The optimization `recomputation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_core.planning.units import duration, size
from djinn_optimizations.recomputation.choices import ReplicaChoice, choices
from djinn_optimizations.recomputation.cone import cones

MAX_TIME_RATIO = 0.8  # maximum predicted time with replicas, as a share of the time without
MIN_GAIN_RATIO = 0.2  # minimum seconds saved per second of recomputing, because devices have other work
MIN_SEND_SHARE = 0.02  # minimum share of the program's time that sending must take for choices to be evaluated
_MARK = "djinn::mark"  # an event that the program records: the ops before it are being timed

Judge = Callable[[Sequence[ReplicaChoice], bool], ReplicaChoice]


def fastest_choice(replica_choices: Sequence[ReplicaChoice], streaming: bool) -> ReplicaChoice:
    """Return the choice with the shortest time, or the first choice, without replicas, if the time saved is too small.

    `streaming`: True to compare the intervals between runs of a pipeline instead of the times of one run.
    """
    times = [choice.interval if streaming else choice.seconds for choice in replica_choices]
    fastest = min(range(len(replica_choices)), key=lambda i: (times[i], replica_choices[i].computing))
    seconds_saved = times[0] - times[fastest]
    min_saving = max((1 - MAX_TIME_RATIO) * times[0], MIN_GAIN_RATIO * replica_choices[fastest].computing)
    return replica_choices[fastest] if seconds_saved > min_saving else replica_choices[0]


class Recomputation(Optimization):
    """Let a device recompute values of another device, if this is faster than a transfer."""

    name = "recomputation"
    tolerates_growth = True
    after = frozenset({"common_subexpressions", "dead_code"})
    after_placement = True

    def __init__(self, judge: Judge = fastest_choice) -> None:
        self._judge = judge

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False, because the optimization acts only over several devices."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return replicas of ops, chosen by the predicted times of computing and sending, or the reason against them."""
        placement = context.placement
        if placement is None:
            return self._not_applied("the program has no placement yet")
        if len(placement.devices) == 1:
            return self._not_applied("everything runs on one device")
        if context.plan.hints.get("groups"):
            return self._not_applied("another optimization has already divided the program into concurrent groups")
        if not hasattr(context.graph, "program") or any(n.op == _MARK for n in context.graph.nodes):
            return self._not_applied("the program records timing events, or there is no recorded program")
        cone_list = cones(context, placement)
        sending = sum(cone.sending[v] for cone in cone_list for v in cone.wanted)
        if not cone_list or sending < MIN_SEND_SHARE * _lower_bound_seconds(context):
            return self._not_applied(
                f"values that could be recomputed take only {duration(sending)} to send" if cone_list else _NOTHING
            )
        candidates = choices(context, placement, cone_list)
        streaming = context.stream.following > 0 and not context.stream.carried
        choice = self._judge(candidates, streaming)
        if not choice.replicas:
            return self._not_applied(_why_sent(candidates, sending))
        count = f"{len(choice.replicas)} ops run on a second device as well"
        comparison = (
            f"{duration(choice.computing)} of computing against {duration(choice.sending)} for {size(choice.nbytes)}"
        )
        reason = f"{count}: {comparison}; {duration(choice.seconds)} in all, {duration(candidates[0].seconds)} if sent"
        return OptimizationResult(self.name, True, reason, Rewrite(replicas=choice.replicas))

    def _not_applied(self, reason: str) -> OptimizationResult:
        return OptimizationResult(self.name, applied=False, reason=reason)


_NOTHING = "no sent value can be computed on the device that uses it"


def _lower_bound_seconds(context: OptimizationContext) -> float:
    """Return the seconds that the placed program would take if all of its devices were always busy."""
    placement = context.placement
    rows = context.costs.by_device
    return (
        sum(rows[d.device][d.node].seconds for d in placement.decisions) / len(placement.devices) if placement else 0.0
    )


def _why_sent(candidates: Sequence[ReplicaChoice], sending: float) -> str:
    """Return the reason why no value is recomputed. `sending`: seconds to send the values that could be recomputed."""
    if len(candidates) == 1:
        return f"sent in {duration(sending)}: recomputing is not faster"
    cheapest_other = min(candidates[1:], key=lambda choice: choice.seconds)
    return (
        f"sent: {size(cheapest_other.nbytes)} in {duration(cheapest_other.sending)} against {duration(cheapest_other.computing)} of computing again; "
        f"{duration(candidates[0].seconds)} in all, {duration(cheapest_other.seconds)} if recomputed"
    )
