"""The pattern `convolution`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import CONVOLUTION, Graph, Node, PatternMatch, is_given
from djinn_cnn.convolution.block import block_at


class Convolution(Pattern):
    """Match a convolution together with the bias, norm and activation that follow it as the only readers."""

    name = "convolution"
    tolerates_growth = True
    operations = CONVOLUTION

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each convolution. The names of modules do not matter."""
        for node in candidates:
            if len(node.inputs) > 1 and node.outputs and len(graph.meta(node.inputs[1]).shape) > 2:
                yield _match(graph, block_at(graph, node))


def _match(graph: Graph, block: Sequence[Node]) -> PatternMatch:
    first, *following = block
    weight = graph.meta(first.inputs[1]).shape
    kernel = "x".join(map(str, weight[2:]))
    followers = ", then ".join(f"{node.operation} (node {node.id})" for node in following)
    then = f"; its result goes to nothing but {followers}" if following else ""
    return PatternMatch(
        pattern=Convolution.name,
        nodes=tuple(node.id for node in block),
        # A computed weight may be a decomposed weight, a filter or data.
        confidence=1.0 if is_given(graph.flow, graph.flow.operands(first)[1]) else 0.97,
        reason=f"node {first.id} is {first.op} with a kernel of {kernel} and {weight[0]} filters{then}",
    )
