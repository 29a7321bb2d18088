"""Routers of mixtures of experts: they choose, for each token, the networks that it goes through."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import attrs

from djinn.planning import SOFTMAX, Graph, Node, arguments
from djinn_core.ir.flow import Flow
from djinn_core.planning.matching.layers import Layer
from djinn_patterns.transformer.layers import Layers, layers_of

_CHOICES = frozenset({"argmax", "max", "topk"})
_SOFTENED = frozenset({
    "_log_softmax", "_softmax", "add", "clamp", "div", "exp", "log_softmax", "masked_fill", "mul", "neg", "pow", "scatter",
    "sigmoid", "softmax", "softplus", "sqrt", "sub", "tanh", "where",
})  # fmt: skip
_LOOKUPS = frozenset({"embedding"})
_MOST = 1024  # experts
_LIMIT = 10  # ops between the router and the choice


@attrs.frozen
class Router:
    """Places at which experts are chosen.

    Attributes:
        layer: the linear layer that scores them. between: ids of the ops from there to the choices.
        choices: the ops that choose, the one that has the last word last.
        experts: how many there are. chosen: how many each token goes to.
        softened: ids of the ops that make shares of the scores, before or after the choice.
    """

    layer: Layer
    between: tuple[int, ...]
    choices: tuple[Node, ...]
    experts: int
    chosen: int

    softened: tuple[int, ...] = ()

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ids of its ops, in order."""
        layer = {self.layer.product.id, self.layer.node.id}
        return tuple(sorted({*layer, *self.between, *(choice.id for choice in self.choices)}))


def routers_of(graph: Graph) -> tuple[Router, ...]:
    """The routers of a graph, in order."""
    found = _known.get(graph.flow)
    if found is None:
        found = _known[graph.flow] = tuple(_found_in(graph))
    return found


_known: WeakKeyDictionary[Flow, tuple[Router, ...]] = WeakKeyDictionary()


def _found_in(graph: Graph) -> Iterable[Router]:
    """A layer's choices are one router: groups of experts may be chosen before the experts, or one after the other."""
    layers = layers_of(graph)
    routers: dict[int, Router] = {}
    for index in sorted(i for operation in _CHOICES for i in graph.by_op.get(operation, ())):
        router = _router(graph, layers, graph.nodes[index])
        if router is None:
            continue
        before = routers.get(router.layer.node.id)
        routers[router.layer.node.id] = router if before is None else _together(before, router)
    return routers.values()


def _together(one: Router, other: Router) -> Router:
    """The choice among more of the scores has the last word; of two alike each chooses, and the first counts first."""
    first, last = sorted((one, other), key=lambda r: r.experts)
    chosen = one.chosen + other.chosen if one.experts == other.experts else last.chosen
    between = (*first.between, *last.between)
    choices, softened = (*first.choices, *last.choices), (*first.softened, *last.softened)
    return Router(last.layer, between, choices, last.experts, min(chosen, last.experts), softened)


def _router(graph: Graph, layers: Layers, choice: Node) -> Router | None:
    shape = graph.meta(choice.inputs[0]).shape
    given = arguments(choice)
    if len(shape) < 2 or given.get("dim", -1) not in {-1, len(shape) - 1}:
        return None
    chosen = given.get("k", 1)
    if not isinstance(chosen, int) or not 1 <= chosen <= shape[-1] or not 1 < shape[-1] <= _MOST:
        return None
    found = _scored(graph, layers, graph.flow.operands(choice)[0])
    if found is None or not _says_which(graph, choice) or not _mixes(graph, layers, found[0]):
        return None
    if _looks_up(graph, choice, shape[-1]):
        return None
    layer, between = found
    width = graph.meta(graph.flow.value(layer.node.id)).shape[-1]
    if width % shape[-1]:
        return None
    after = (i for i in graph.flow.users(choice.id) if graph.nodes[i].operation in SOFTMAX)
    return Router(layer, between, (choice,), shape[-1], chosen, (*between, *after))


def _says_which(graph: Graph, choice: Node) -> bool:
    """True if the program uses the indices of the choice, and not only the scores."""
    return choice.operation != "max" or any(graph.consumers(value) for value in choice.outputs[1:])


def _scored(graph: Graph, layers: Layers, source: int) -> tuple[Layer, tuple[int, ...]] | None:
    """The linear layer that gives the scores, and the ops after it."""
    between: list[int] = []
    while source >= 0 and len(between) < _LIMIT:
        layer = layers.whole.get(source)
        if layer is not None:
            return layer, tuple(between)
        node = graph.nodes[source]
        if node.operation not in _SOFTENED:
            return None
        between.append(node.id)
        operands = graph.flow.operands(node)
        source = operands[1] if node.operation == "where" and len(operands) > 1 else operands[0]
    return None


def _looks_up(graph: Graph, choice: Node, scores: int) -> bool:
    """True if the chosen indices are looked up in a table with a row for each score: sampled tokens that feed the next step."""
    flow = graph.flow
    for user in flow.descendants(choice.id, _LOOKUPS, limit=_LIMIT):
        node = graph.nodes[user]
        if node.operation in _LOOKUPS and graph.meta(node.inputs[0]).shape[:1] == (scores,):
            return True
    return False


def _mixes(graph: Graph, layers: Layers, router: Layer) -> bool:
    """True if the router's input is also read by other ops, the experts. Gradients of the router itself do not count."""
    end = layers.backward if router.product.id < layers.backward else len(graph.nodes)
    return any(user != router.product.id and user < end for user in graph.flow.users(graph.flow.beyond(router.data)))
