"""Convolution block: a convolution with the bias, norm and activation that only its result passes through."""

from __future__ import annotations

import attrs

from djinn.planning import ACTIVATION, NORMALISATION, Graph, Node, is_backward, is_given

_SUMS = frozenset({"add", "add_"})


@attrs.frozen
class Block:
    """A convolution with the ops that follow it.

    Attributes:
        convolution: the op. bias, norm, activation: the ops after it, in this order; None if absent.
        residual: the addition of another computed value to the result; None if there is none.
    """

    convolution: Node
    bias: Node | None = None
    norm: Node | None = None
    activation: Node | None = None
    residual: Node | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of the ops, without the residual addition, which belongs to two branches."""
        return tuple(n.id for n in (self.convolution, self.bias, self.norm, self.activation) if n is not None)


def block_at(graph: Graph, convolution: Node) -> Block:
    """Return the block that begins with `convolution`."""
    bias = norm = None
    after = _only_user(graph, convolution)
    if after is not None and after.operation in _SUMS and _adds_bias(graph, after, convolution):
        bias, after = after, _only_user(graph, after)
    if after is not None and after.operation in NORMALISATION and _is_data(graph, after, bias or convolution):
        norm, after = after, _only_user(graph, after)
    if after is not None and after.operation in ACTIVATION:
        return Block(convolution, bias, norm, after)
    if after is not None and after.operation in _SUMS and len(after.inputs) == 2:
        return Block(convolution, bias, norm, None, after)
    return Block(convolution, bias, norm)


def _only_user(graph: Graph, node: Node) -> Node | None:
    """Return the only user of the result. The second use by a backward pass does not count."""
    users = graph.flow.users(node.id)
    if len(users) > 1:
        users = [i for i in users if not is_backward(graph.nodes[i])]
    return graph.nodes[users[0]] if len(users) == 1 else None


def _is_data(graph: Graph, node: Node, maker: Node) -> bool:
    return graph.flow.operands(node)[0] == maker.id


def _adds_bias(graph: Graph, node: Node, maker: Node) -> bool:
    others = [s for s in graph.flow.operands(node) if s != maker.id]
    return len(others) == 1 and is_given(graph.flow, others[0])
