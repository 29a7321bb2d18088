"""Find convolution blocks: a convolution with the bias, norm and activation that follow it."""

from __future__ import annotations

from djinn.planning import ACTIVATION, NORMALISATION, Graph, Node, is_backward, is_given

_SUMS = frozenset({"add", "add_"})


def block_at(graph: Graph, convolution: Node) -> list[Node]:
    """Return the ops of the block that starts with `convolution`, in order."""
    block, after = [convolution], _only_user(graph, convolution)
    if after is not None and after.operation in _SUMS and _adds_bias(graph, after, convolution):
        block.append(after)
        after = _only_user(graph, after)
    if after is not None and after.operation in NORMALISATION and graph.flow.operands(after)[0] == block[-1].id:
        block.append(after)
        after = _only_user(graph, after)
    if after is not None and after.operation in ACTIVATION:
        block.append(after)
    return block


def _only_user(graph: Graph, node: Node) -> Node | None:
    """Return the only node that uses a node's result, or None. Uses by the backward pass do not count."""
    users = graph.flow.users(node.id)
    if len(users) > 1:
        users = [i for i in users if not is_backward(graph.nodes[i])]
    return graph.nodes[users[0]] if len(users) == 1 else None


def _adds_bias(graph: Graph, node: Node, maker: Node) -> bool:
    other_operands = [s for s in graph.flow.operands(node) if s != maker.id]
    return len(other_operands) == 1 and is_given(graph.flow, other_operands[0])
