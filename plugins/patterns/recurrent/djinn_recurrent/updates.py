"""One step of a state: what is kept of the old one, and what is added.

- new = gate * old + something: LSTM, state spaces, linear attention
- new = gate * (old - something) + something: GRU
- new = tanh(layer(old) + layer(input)): plain cells
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn.hooks import Graph, Node
from djinn.patterns import NORMALISATION, layer_at
from djinn_recurrent.walks import LAYERS, plain

GATES = frozenset({"exp", "exp_", "exp2", "hardsigmoid", "hardsigmoid_", "sigmoid", "sigmoid_"})
BENDS = frozenset({"relu", "relu_", "tanh", "tanh_"})
_TIMES = frozenset({"mul", "mul_"})
_PLUS = frozenset({"add", "add_", "sub", "sub_"})
_ONE_LESS = frozenset({"rsub", "sub"})
_COMBINED = frozenset({"addcmul", "addcmul_", "lerp", "lerp_"})
_BEFORE_BEND = frozenset({*NORMALISATION, *_PLUS, "addmm", "div", "linear", "matmul", "mm", "mul"})
_LAYERS_BEHIND = 8


@attrs.frozen
class Update:
    """One step.

    Attributes:
        node: the op whose result is the new state.
        state: source of the old state.
        by: the op that says what is kept: a gate, or the bend of a plain cell.
        nodes: ids of the ops between.
    """

    node: int
    state: int
    by: int
    nodes: tuple[int, ...]
    bent: bool = False


def kept(graph: Graph, gates: Iterable[Node]) -> Iterator[Update]:
    """The steps in which one of `gates` is multiplied with a state, and something added."""
    for gate in gates:
        for factor in (gate.id, *_one_less(graph, gate)):
            for user in graph.flow.users(factor):
                yield from _used(graph, gate.id, factor, graph.nodes[user])


def _one_less(graph: Graph, gate: Node) -> list[int]:
    """Ids of the ops that take a gate from one."""
    users = graph.flow.users(gate.id)
    return [u for u in users if graph.nodes[u].operation in _ONE_LESS and len(graph.nodes[u].inputs) == 1]


def _used(graph: Graph, gate: int, factor: int, node: Node) -> Iterator[Update]:
    flow = graph.flow
    if node.operation in _COMBINED:
        for state in dict.fromkeys(flow.operands(node)):
            if state not in {gate, factor}:
                yield Update(node.id, state, gate, (gate, factor, node.id))
    elif node.operation in _TIMES:
        states = [s for s in flow.operands(node) if s != factor]
        for user in flow.users(node.id) if states else ():
            if graph.nodes[user].operation in _PLUS and len(graph.nodes[user].inputs) > 1:
                for state, between in _states(graph, states[0]):
                    yield Update(user, state, gate, (gate, factor, node.id, *between, user))


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
    """What the layers read whose sum is bent, and the ops from there to the bend."""
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
    """What is put side by side in `source`, if it is."""
    maker = graph.flow.node(source)
    return list(graph.flow.operands(maker)) if maker is not None and plain(maker.operation) == "cat" else []
