"""The optimizations `common_subexpressions` and `dead_code`."""

from __future__ import annotations

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import OptimizationResult, Rewrite
from djinn_optimizations.cleanup.dead import dead_nodes
from djinn_optimizations.cleanup.equal import merge

_MARK = "djinn::mark"  # an event that the program records: the ops before it are being timed
_OFF = "off by default, because it saves little time; the setting `plugins.cleanup.on` activates it"
_TIMED = "the program records events, so timed ops run as recorded"


class _Cleanup(Optimization):
    """Base class of both optimizations. Programs that record events stay unchanged."""

    tolerates_growth = True

    def __init__(self, *, on: bool = True) -> None:
        """Create the optimization. If `on` is False, all programs stay unchanged."""
        self._on = on

    def wants(self, ops: frozenset[str]) -> bool:
        """Return False: a program is not planned for this rewrite alone, which saves less time than planning costs."""
        del ops
        return False

    def _refusal(self, context: OptimizationContext) -> OptimizationResult | None:
        is_timed = self._on and any(node.op == _MARK for node in context.graph.nodes)
        reason = _TIMED if is_timed else "" if self._on else _OFF
        return OptimizationResult(self.name, applied=False, reason=reason) if reason else None


class CommonSubexpressions(_Cleanup):
    """Compute an expression once if a program computes it several times."""

    name = "common_subexpressions"
    before = frozenset({"dead_code"})

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Replace each repeated computation by the first one."""
        if reason := self._refusal(context):
            return reason
        repeats = merge(context.graph, context.plan, context.kept)
        if not repeats.drop:
            return OptimizationResult(self.name, applied=False, reason="no op repeats an earlier op")
        rewrite = Rewrite(frozenset(repeats.drop), repeats.replace, equal_slots=tuple(repeats.equal_slots))
        condition = f", as long as {len(repeats.equal_slots)} pairs of scalars are equal" if repeats.equal_slots else ""
        return OptimizationResult(self.name, True, f"{len(repeats.drop)} ops repeat earlier ops{condition}", rewrite)


class DeadCode(_Cleanup):
    """Remove ops whose results no later op and no caller uses."""

    name = "dead_code"

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Remove each op that has no side effect and on which no value that outlives the program depends."""
        if reason := self._refusal(context):
            return reason
        dead = dead_nodes(context.graph, context.plan, context.kept)
        if not dead:
            return OptimizationResult(self.name, applied=False, reason="the result of every op is used")
        return OptimizationResult(self.name, True, f"the results of {len(dead)} ops are not used", Rewrite(dead))
