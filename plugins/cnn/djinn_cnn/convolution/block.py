"""Find convolution blocks: a convolution with the bias, norm and activation that follow it."""

from __future__ import annotations

from djinn.planning import ACTIVATION, NORMALISATION, Graph, Node, is_backward, is_weight

_SUMS = frozenset({"add", "add_"})


def block_at(graph: Graph, convolution: Node) -> list[Node]:
    """Return the ops of the block that starts with the node `convolution`, in order."""
    block, user = [convolution], _only_user(graph, convolution)
    if user is not None and user.operation in _SUMS and _adds_bias(graph, user, convolution):
        block.append(user)
        user = _only_user(graph, user)
    if user is not None and user.operation in NORMALISATION and graph.flow.operands(user)[0] == block[-1].id:
        block.append(user)
        user = _only_user(graph, user)
    if user is not None and user.operation in ACTIVATION:
        block.append(user)
    return block


def _only_user(graph: Graph, node: Node) -> Node | None:
    """Return the node that alone uses a node's result, or None if there are several or none. Ignore the backward pass."""
    users = graph.flow.users(node.id)
    if len(users) > 1:
        users = [i for i in users if not is_backward(graph.nodes[i])]
    return graph.nodes[users[0]] if len(users) == 1 else None


def _adds_bias(graph: Graph, node: Node, maker: Node) -> bool:
    other_operands = [s for s in graph.flow.operands(node) if s != maker.id]
    return len(other_operands) == 1 and is_weight(graph.flow, other_operands[0])
