"""An optimization for Djinn: drops a ReLU of a ReLU."""

from __future__ import annotations

from djinn.hooks import Node, Optimization, OptimizationContext, OptimizationResult, Rewrite, hookimpl

djinn_api_version = "2.0"


class ExampleOptimization:
    """The ReLU of a ReLU is that ReLU."""

    name = "example"
    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    after_placement = False
    tolerates_growth = True  # what it says does not depend on how long a sequence or a cache is

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """A rewrite with the reason for it, or `applied=False` with the reason against."""
        running = [context.graph.nodes[node] for node in context.plan.nodes]
        written = {value for node in running for value in node.writes}
        replace: dict[int, int] = {}
        for node in running:
            if _needless(node, context, written):
                replace[node.outputs[0]] = replace.get(node.inputs[0], node.inputs[0])
        if not replace:
            return OptimizationResult(self.name, applied=False, reason="no ReLU is applied to a ReLU")
        dropped = [node.id for node in running if node.outputs and node.outputs[0] in replace]
        reason = f"{len(dropped)} ReLUs are applied to what a ReLU made"
        return OptimizationResult(self.name, True, reason, Rewrite(drop=frozenset(dropped), replace=replace))


def _needless(node: Node, context: OptimizationContext, written: set[int]) -> bool:
    if node.op != "aten::relu" or node.outputs[0] in context.kept:
        return False
    maker = context.graph.producer(node.inputs[0])
    touched = written & {*node.inputs, *node.outputs}
    return maker is not None and maker.op == "aten::relu" and maker.id in context.plan.nodes and not touched


@hookimpl
def djinn_register_optimizations() -> list[Optimization]:
    """The optimizations that this plugin offers."""
    return [ExampleOptimization()]
