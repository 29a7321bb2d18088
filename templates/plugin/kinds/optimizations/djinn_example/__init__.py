"""An optimization for Djinn: drops a ReLU of a ReLU."""

from __future__ import annotations

from djinn.hooks import Optimization, OptimizationContext, hookimpl
from djinn.planning import OptimizationResult, Rewrite

djinn_api_version = "2.0"


class ExampleOptimization(Optimization):
    """The ReLU of a ReLU is that ReLU."""

    name = "example"
    tolerates_growth = True  # the decision does not depend on how long a sequence or a cache is

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a rewrite with the reason for it, or `applied=False` with the reason against."""
        running = [context.graph.nodes[node] for node in context.plan.nodes]
        needed = context.kept.union(*(node.writes for node in running))  # by the client, or written later
        relus = {node.outputs[0]: node for node in running if node.op == "aten::relu"}
        again = [n for n in relus.values() if n.inputs[0] in relus and not needed & {*n.inputs, *n.outputs}]
        replace: dict[int, int] = {}
        for node in again:
            replace[node.outputs[0]] = replace.get(node.inputs[0], node.inputs[0])
        rewrite = Rewrite(drop=frozenset(node.id for node in again), replace=replace)
        return OptimizationResult(self.name, bool(again), f"{len(again)} ReLUs of a ReLU", rewrite)


@hookimpl
def djinn_register_optimizations() -> list[Optimization]:
    """The optimizations that this plugin offers."""
    return [ExampleOptimization()]
