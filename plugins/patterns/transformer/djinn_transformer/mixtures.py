"""The pattern `mixture_of_experts`: a router that chooses, for each token, the networks that it goes through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from djinn.hooks import Graph, Node, PatternMatch, arguments
from djinn.patterns import Layer, layer_at

CHOICES = frozenset({"argmax", "max", "topk"})
_SOFTENED = frozenset({"_softmax", "add", "div", "masked_fill", "mul", "sigmoid", "softmax", "sqrt", "softplus"})
_MOST = 1024  # experts
_LIMIT = 8  # ops between the router and the choice


@attrs.frozen
class Router:
    """Where experts are chosen.

    Attributes:
        layer: the linear layer that scores them. between: ids of the ops from there to the choice. choice: the op.
        experts: how many there are. chosen: how many each token goes to.
    """

    layer: Layer
    between: tuple[int, ...]
    choice: Node
    experts: int
    chosen: int


class MixtureOfExperts:
    """A choice of the best few among the scores that a linear layer gives each token."""

    name = "mixture_of_experts"
    tolerates_growth = True
    operations = CHOICES

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each router, which covers it and the choice."""
        for router in routers(graph, candidates):
            yield _match(router)


def _match(router: Router) -> PatternMatch:
    nodes = {router.layer.product.id, router.layer.node.id, *router.between, router.choice.id}
    return PatternMatch(
        pattern=MixtureOfExperts.name,
        nodes=tuple(sorted(nodes)),
        confidence=0.95,
        reason=f"node {router.choice.id} ({router.choice.op}) chooses {router.chosen} of the {router.experts} scores that "
        f"the linear layer in node {router.layer.node.id} gives each token",
        hints={"experts": router.experts},
        details={"experts": router.experts, "chosen": router.chosen},
    )


def routers(graph: Graph, candidates: Sequence[Node]) -> Iterable[Router]:
    """The routers whose choice is one of `candidates`."""
    seen: set[int] = set()
    for node in candidates:
        router = _router(graph, node)
        if router is not None and router.layer.node.id not in seen:
            seen.add(router.layer.node.id)
            yield router


def _router(graph: Graph, choice: Node) -> Router | None:
    shape = graph.meta(choice.inputs[0]).shape
    given = arguments(choice)
    if len(shape) < 2 or given.get("dim", -1) not in {-1, len(shape) - 1}:
        return None
    chosen = given.get("k", 1)
    experts = shape[-1]
    if not isinstance(chosen, int) or not 1 <= chosen < experts <= _MOST:
        return None
    found = _scored(graph, graph.flow.operands(choice)[0])
    if found is None or not _mixes(graph, found[0]):
        return None
    layer, between = found
    return Router(layer, between, choice, experts, chosen)


def _scored(graph: Graph, source: int) -> tuple[Layer, tuple[int, ...]] | None:
    """The linear layer that gives the scores, and the ops after it."""
    between: list[int] = []
    while source >= 0 and len(between) < _LIMIT:
        node = graph.nodes[source]
        layer = layer_at(graph, node)
        if layer is not None:
            return layer, tuple(between)
        if node.operation not in _SOFTENED:
            return None
        between.append(node.id)
        source = graph.flow.operands(node)[0]
    return None


def _mixes(graph: Graph, router: Layer) -> bool:
    """Whether what is scored is also computed with: the experts get it."""
    return any(user != router.product.id for user in graph.flow.users(graph.flow.beyond(router.data)))
