"""The pattern class `Convolution`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from djinn.hooks import Pattern
from djinn.planning import CONVOLUTION, Graph, Node, PatternMatch, is_given
from djinn_cnn.convolution.block import Block, block_at
from djinn_cnn.convolution.facts import Geometries, Geometry


class Convolution(Pattern):
    """Match a convolution with the bias, norm and activation that only its result passes through.

    Consecutive convolutions with one output size form a `stage`. Stages are numbered from 0.
    """

    name = "convolution"
    tolerates_growth = True
    operations = CONVOLUTION

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Return one match for each convolution. Module names are not used."""
        geometries, size, stage = Geometries(graph), None, -1
        for node in candidates:
            geometry = geometries.of(node)
            if geometry is None:
                continue
            if geometry.size != size:
                stage, size = stage + 1, geometry.size
            yield _match(graph, block_at(graph, node), geometry, stage)


def _match(graph: Graph, block: Block, geometry: Geometry, stage: int) -> PatternMatch:
    return PatternMatch(
        pattern=Convolution.name,
        nodes=block.nodes,
        confidence=_confidence(graph, block.convolution),
        reason=_reason(block, geometry),
        details=_details(block, geometry) | {"stage": stage},
    )


def _details(block: Block, geometry: Geometry) -> dict[str, Any]:
    return {
        "kind": geometry.kind,
        "dimensions": geometry.dimensions,
        "kernel": geometry.kernel,
        "stride": geometry.stride,
        "channels": geometry.channels,
        "groups": geometry.groups,
        "size": geometry.size,
        "norm": block.norm.operation if block.norm is not None else None,
        "activation": block.activation.operation if block.activation is not None else None,
        "residual": block.residual is not None,
    }


def _confidence(graph: Graph, convolution: Node) -> float:
    """Return the confidence. It is lower for a computed weight, which may be a decomposed weight, a filter or data."""
    weight = graph.flow.operands(convolution)[1]
    return 1.0 if is_given(graph.flow, weight) else 0.97


_KINDS = {
    "standard": "over all channels",
    "pointwise": "which mixes channels and no places (pointwise)",
    "depthwise": "one filter a channel (depthwise)",
    "grouped": "within groups of channels",
    "transposed": "which enlarges (transposed)",
}


def _reason(block: Block, geometry: Geometry) -> str:
    node, (before, after) = block.convolution, geometry.channels
    kernel = "x".join(map(str, geometry.kernel))
    followers = [n for n in (block.bias, block.norm, block.activation) if n is not None]
    names = ", then ".join(f"{n.operation} (node {n.id})" for n in followers)
    then = f"; its result goes to nothing but {names}" if followers else ""
    addition = f"; the result is added to another in node {block.residual.id}" if block.residual is not None else ""
    kind = _KINDS[geometry.kind]
    return f"node {node.id} is {node.op} with a kernel of {kernel}, {kind}, from {before} channels to {after}{then}{addition}"
