"""An optimization for Djinn: drop the second of two consecutive ReLUs."""

from __future__ import annotations

from djinn.hooks import Optimization, OptimizationContext, hookimpl
from djinn.planning import OptimizationResult, Rewrite

djinn_api_version = "2.0"


class ExampleOptimization(Optimization):
    """Replace `relu(relu(x))` by `relu(x)`."""

    name = "example"
    tolerates_growth = True  # the decision does not depend on the length of a sequence or cache

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a rewrite with the reason for it, or `applied=False` with the reason against."""
        running = [context.graph.nodes[node] for node in context.plan.nodes]
        needed = context.kept.union(*(node.writes for node in running))  # by the client, or written by a later op
        relus = {node.outputs[0]: node for node in running if node.op == "aten::relu"}
        again = [n for n in relus.values() if n.inputs[0] in relus and not needed & {*n.inputs, *n.outputs}]
        replace: dict[int, int] = {}
        for node in again:
            replace[node.outputs[0]] = replace.get(node.inputs[0], node.inputs[0])
        rewrite = Rewrite(drop=frozenset(node.id for node in again), replace=replace)
        return OptimizationResult(self.name, bool(again), f"{len(again)} ReLUs of a ReLU", rewrite)


@hookimpl
def djinn_register_optimizations() -> list[Optimization]:
    """Return the optimizations of this plugin."""
    return [ExampleOptimization()]
