"""Move a pooling before elementwise ops and pointwise convolutions, which then process fewer elements."""

from __future__ import annotations

from djinn.hooks import Optimization, OptimizationContext
from djinn.planning import Graph, Node, OptimizationResult, Rewrite, Substitution, storage_of
from djinn_optimizations.pooling.pairs import Pair, pair_of
from djinn_optimizations.pooling.pooling import POOLINGS, pooling_of


class PoolFirst(Optimization):
    """Swap a pooling with the op before it, or merge two poolings.

    - `avg_pool(conv1x1(x))` becomes `conv1x1(avg_pool(x))`, with a fraction of the multiplications.
    - `max_pool(f(x))` with an increasing `f` becomes `f(max_pool(x))`, with a fraction of the elements.
    - Two poolings with adjacent windows become one pooling with larger windows, which saves one pass.

    A pooling is moved only if it reduces the number of elements, because then the rewrite is always faster. Results may
    differ in rounding and in the sign of zeros.
    """

    name = "pool_first"
    before = frozenset({"split_batches"})
    after = frozenset({"fold_batch_norms"})
    exact = False
    tolerates_growth = True  # it substitutes only the calls that it inspected, so plans for other sizes stay correct

    def wants(self, ops: frozenset[str]) -> bool:
        """Return True if the program has poolings."""
        return not ops.isdisjoint(POOLINGS)

    def optimize(self, context: OptimizationContext) -> OptimizationResult:
        """Return a substitution for each pooling that can run before, or together with, the preceding op."""
        graph, running, replaced_nodes = (
            context.graph,
            frozenset(context.plan.nodes),
            set(context.plan.substituted_nodes),
        )
        pairs: list[tuple[Substitution, str]] = []
        for node in (graph.nodes[n] for n in context.plan.nodes):
            pooling = pooling_of(graph, node)
            pair = pair_of(graph, pooling) if pooling is not None else None
            if (
                pair is None
                or not pair.nodes <= running
                or replaced_nodes & pair.nodes
                or not _is_isolated(context, pair)
            ):
                continue
            replaced_nodes |= pair.nodes
            substitution = Substitution(pair.nodes, pair.inputs, pair.pooling.node.outputs[:1], pair.compute)
            pairs.append((substitution, f"{pair.name} ({_remaining_share(graph, pair)} of the elements)"))
        if not pairs:
            return OptimizationResult(
                self.name, applied=False, reason="no pooling can be swapped with the op before it"
            )
        substitutions = tuple(substitution for substitution, _ in pairs)
        reason = f"{len(pairs)} poolings run earlier: {', '.join(dict.fromkeys(note for _, note in pairs))}"
        return OptimizationResult(self.name, True, reason, Rewrite(substitutions=substitutions))


def _is_isolated(context: OptimizationContext, pair: Pair) -> bool:
    """Return True if `pair` can be replaced: only its own nodes use its results, apart from the pooled values.

    Also, no node between the nodes of the pair may write the inputs of the pair or its intermediate values.
    """
    graph = context.graph
    nodes: list[Node] = [graph.nodes[n] for n in sorted(pair.nodes)]
    intermediate = {v for node in nodes for v in node.outputs} - {pair.pooling.node.outputs[0]}
    memory = {storage_of(v) for v in (*intermediate, *pair.inputs)}
    nodes_between = [n for n in graph.nodes[nodes[0].id : nodes[-1].id] if n.id not in pair.nodes]
    return (
        context.kept.isdisjoint(intermediate)
        and all(user.id in pair.nodes for value in intermediate for user in graph.consumers(value))
        and not any(storage_of(v) in memory for node in nodes_between for v in node.writes)
    )


def _remaining_share(graph: Graph, pair: Pair) -> str:
    preceding, after = (graph.meta(v).numel for v in (pair.pooling.source, pair.pooling.node.outputs[0]))
    return f"{after / preceding:.2g}"
