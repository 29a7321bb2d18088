"""The pattern `convolution`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import CONVOLUTION, Graph, Node, PatternMatch, is_weight
from djinn_cnn.convolution.block import block_at


class Convolution(Pattern):
    """Match a convolution, with a following bias, norm and activation if each is the only reader of its input."""

    name = "convolution"
    tolerates_growth = True
    operations = CONVOLUTION

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield a match for each convolution among `candidates`. The names of modules do not matter."""
        for node in candidates:
            if len(node.inputs) > 1 and node.outputs and len(graph.meta(node.inputs[1]).shape) > 2:
                yield _match(graph, block_at(graph, node))


def _match(graph: Graph, block: Sequence[Node]) -> PatternMatch:
    first, *following = block
    weight = graph.meta(first.inputs[1]).shape
    kernel = "x".join(map(str, weight[2:]))
    followers = ", then ".join(f"{node.operation} (node {node.id})" for node in following)
    follower_note = f"; its result is only read by {followers}" if following else ""
    return PatternMatch(
        pattern=Convolution.name,
        nodes=tuple(node.id for node in block),
        # A computed weight may be a decomposed weight, a filter or data.
        confidence=1.0 if is_weight(graph.flow, graph.flow.operands(first)[1]) else 0.97,
        reason=f"node {first.id} is {first.op} with a kernel of {kernel} and {weight[0]} filters{follower_note}",
    )
