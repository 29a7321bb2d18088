"""The two optimizations as the core calls them."""

from __future__ import annotations

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_optimizations.cleanup.dead import dead_nodes
from djinn_optimizations.cleanup.equal import merge

_MARK = "djinn::mark"  # an event that the program records: what comes before it is being timed
_TIMED = "the program records events: what is timed runs as it was written"


def _is_timed(context: OptimizationContext) -> bool:
    return any(node.op == _MARK for node in context.graph.nodes)


class CommonSubexpressions(Optimization):
    """Computes once what is computed twice."""

    name = "common_subexpressions"
    tolerates_growth = True
    before = frozenset({"dead_code"})

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False: a plan for this alone saves less than it costs."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Replace each repeated computation by the first."""
        if _is_timed(context):
            return OptimizationResult(self.name, applied=False, reason=_TIMED)
        merged = merge(context.graph, context.plan, context.kept)
        if not merged.drop:
            return OptimizationResult(self.name, applied=False, reason="no op repeats another")
        rewrite = Rewrite(frozenset(merged.drop), merged.replace, equal_slots=tuple(merged.equal_slots))
        held = f", while {len(merged.equal_slots)} pairs of scalars are equal" if merged.equal_slots else ""
        return OptimizationResult(self.name, True, f"{len(merged.drop)} ops repeat others{held}", rewrite)


class DeadCode(Optimization):
    """Drops work without observable results."""

    name = "dead_code"
    tolerates_growth = True

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False: a plan for this alone saves less than it costs."""
        del ops
        return False

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Drop every op that neither leads to a kept value nor has an effect."""
        if _is_timed(context):
            return OptimizationResult(self.name, applied=False, reason=_TIMED)
        dead = dead_nodes(context.graph, context.plan, context.kept)
        if not dead:
            return OptimizationResult(self.name, applied=False, reason="every op leads to something that is kept")
        return OptimizationResult(self.name, True, f"the results of {len(dead)} ops are not used", Rewrite(dead))
