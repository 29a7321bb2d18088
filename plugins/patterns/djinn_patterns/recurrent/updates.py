"""One step of a state: what is kept of the old one, and what is added.

- new = gate * old + something: LSTM, state spaces, linear attention
- new = gate * (old - something) + something: GRU
- new = tanh(layer(old) + layer(input)): plain cells
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.planning import NORMALISATION, Graph, Node, layer_at
from djinn_patterns.recurrent.walks import LAYERS, plain

GATES = frozenset({"exp", "exp_", "exp2", "hardsigmoid", "hardsigmoid_", "sigmoid", "sigmoid_"})
BENDS = frozenset({"relu", "relu_", "tanh", "tanh_"})
_TIMES = frozenset({"mul", "mul_"})
_PLUS = frozenset({"add", "add_", "sub", "sub_"})
_ONE_LESS = frozenset({"rsub", "sub"})
_COMBINED = frozenset({"addcmul", "addcmul_", "lerp", "lerp_"})
_BEFORE_BEND = frozenset({*NORMALISATION, *_PLUS, "addmm", "div", "linear", "matmul", "mm", "mul"})
_MOVES = frozenset({"cat", "constant_pad_nd", "index", "index_select", "roll"})
_MASKS = frozenset({"clamp", "masked_fill", "where"})
_LAYERS_BEHIND = 8
_SCALED, _MOST_FACTORS, _SMALL = 3, 4, 4


@attrs.frozen
class Update:
    """One step.

    Attributes:
        node: the op whose result is the new state.
        state: source of the old state.
        by: the op that says what is kept: a gate, or the bend of a plain cell.
        nodes: ids of the ops between.
        bent: whether it is that of a plain cell. differs: whether the state is in a difference.
    """

    node: int
    state: int
    by: int
    nodes: tuple[int, ...]
    bent: bool = False
    differs: bool = False


def kept(graph: Graph, gates: Iterable[Node]) -> Iterator[Update]:
    """The steps in which one of `gates` is multiplied with a state, and something added."""
    for gate in gates:
        for factor, path in _factors(graph, gate).items():
            for user in graph.flow.users(factor):
                if user not in path:
                    yield from _used(graph, gate.id, factor, path, graph.nodes[user])


def _factors(graph: Graph, gate: Node) -> dict[int, tuple[int, ...]]:
    """Value of the gate, itself or scaled, masked or taken from one; and the ops up to there."""
    found: dict[int, tuple[int, ...]] = {gate.id: (gate.id,)}
    front = [gate.id]
    for _ in range(_SCALED):
        users = [(u, n) for n in front for u in graph.flow.users(n) if _scales(graph, graph.nodes[u], n)]
        front = [u for u, _ in users if u not in found][:_MOST_FACTORS]
        found.update((u, (*found[n], u)) for u, n in users if u in front)
    return found


def _scales(graph: Graph, node: Node, gate: int) -> bool:
    operation = plain(node.operation)
    if operation in _MASKS or (operation in _ONE_LESS and len(node.inputs) == 1):
        return True
    others = [s for s in graph.flow.operands(node) if s != gate]
    if operation == "mul" and others and all(_is_moved(graph, s, gate) for s in others):
        return True
    return operation in {"add", "mul"} and all(_is_small(graph, s) for s in others)


def _is_moved(graph: Graph, source: int, gate: int) -> bool:
    """True if `source` is the same gate at other positions, as in a parallel scan, which multiplies the gates of two segments."""
    node = graph.flow.node(source)
    return node is not None and node.operation in _MOVES and gate in graph.flow.operands(node)


def _is_small(graph: Graph, source: int) -> bool:
    """True if `source` is a weight, a mask or another value that no layer computes."""
    for _ in range(_SMALL):
        if source < 0:
            return True
        node = graph.nodes[source]
        if node.operation in LAYERS or plain(node.operation) in {
            "add",
            "cat",
            "mul",
            "zeros",
            "zeros_like",
            "new_zeros",
        }:
            return False
        source = next(iter(graph.flow.operands(node)), -1)
    return False


def _used(graph: Graph, gate: int, factor: int, path: tuple[int, ...], node: Node) -> Iterator[Update]:
    flow = graph.flow
    if node.operation in _COMBINED:
        for state in dict.fromkeys(flow.operands(node)):
            if state not in {gate, factor}:
                yield Update(node.id, state, gate, (*path, node.id))
    elif node.operation in _TIMES:
        states = [s for s in flow.operands(node) if s != factor]
        for user in flow.users(node.id) if states else ():
            if graph.nodes[user].operation in _PLUS and len(graph.nodes[user].inputs) > 1:
                found = _states(graph, states[0])
                for state, between in found:
                    yield Update(user, state, gate, (*path, node.id, *between, user), differs=len(found) > 1)


def _states(graph: Graph, source: int) -> list[tuple[int, tuple[int, ...]]]:
    """`source`, and what it is the difference of."""
    maker = graph.flow.node(source)
    if maker is None or maker.operation not in {"sub", "sub_"} or len(maker.inputs) < 2:
        return [(source, ())]
    return [(source, ()), *((s, (maker.id,)) for s in graph.flow.operands(maker))]


def bent(graph: Graph, bends: Sequence[Node]) -> Iterator[Update]:
    """The steps of plain cells: a bend over layers, one of which reads a state."""
    for node in bends:
        layers = _layers_behind(graph, node)
        if len(layers) < 2 and not any(_is_joined(graph, data) for data, _ in layers):
            continue
        for data, passed in layers:
            for state in (data, *(_joined(graph, data))):
                yield Update(node.id, state, node.id, (*passed, node.id), bent=True)


def _layers_behind(graph: Graph, bend: Node) -> list[tuple[int, tuple[int, ...]]]:
    """Inputs of the layers whose sum goes through an activation, and the ops from there to the bend."""
    flow = graph.flow
    found: list[tuple[int, tuple[int, ...]]] = []
    queue: list[tuple[int, tuple[int, ...]]] = [(s, ()) for s in flow.operands(bend)[:1]]
    steps = 0
    while queue and steps < _LAYERS_BEHIND:
        steps += 1
        source, passed = queue.pop()
        node = flow.node(source)
        if node is None or node.operation not in _BEFORE_BEND:
            continue
        layer = layer_at(graph, node) if node.operation in LAYERS else None
        if layer is not None:
            found.append((flow.beyond(layer.data), (*passed, node.id)))
        elif node.operation not in LAYERS:
            queue += [(s, (*passed, node.id)) for s in flow.operands(node)]
    return found


def _is_joined(graph: Graph, source: int) -> bool:
    return bool(_joined(graph, source))


def _joined(graph: Graph, source: int) -> list[int]:
    """Operands concatenated in `source`, if any."""
    maker = graph.flow.node(source)
    return list(graph.flow.operands(maker)) if maker is not None and plain(maker.operation) == "cat" else []
