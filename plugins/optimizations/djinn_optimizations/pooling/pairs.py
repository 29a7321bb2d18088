"""Find pairs of a pooling and the op before it that can be swapped or merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from djinn.planning import Graph, Node, arguments, call_again
from djinn_optimizations.pooling.pooling import Pooling, pooling_of

Compute = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
# Increasing functions, with the arguments that make them increasing.
_INCREASING: Final[dict[str, Callable[[dict[str, Any]], bool]]] = {
    "relu": lambda _: True,
    "hardtanh": lambda _: True,
    "sigmoid": lambda _: True,
    "tanh": lambda _: True,
    "leaky_relu": lambda given: given.get("negative_slope", 0.01) >= 0,
    "elu": lambda given: min(given.get(name, 1) for name in ("alpha", "scale", "input_scale")) >= 0,
}


@attrs.frozen(eq=False)
class Pair:
    """A pooling and the op before it.

    Attributes:
        name: the rewrite, in words.
        pooling: the pooling.
        nodes: ids of all nodes of the pair.
        inputs: input values of the pair.
        compute: function that computes the same result faster.
    """

    name: str
    pooling: Pooling
    nodes: frozenset[int]
    inputs: tuple[int, ...]
    compute: Compute


def pair_of(graph: Graph, pooling: Pooling) -> Pair | None:
    """Return the pair that ends with a pooling. If no rewrite applies to it, return None."""
    for rule in (_after_activation, _after_convolution, _after_pooling):
        if (pair := rule(graph, pooling)) is not None:
            return pair
    return None


def _after_activation(graph: Graph, pooling: Pooling) -> Pair | None:
    """Rewrite `max_pool(f(x))` as `f(max_pool(x))` for an increasing `f`.

    If `f` works in place, it also returns `f(x)`.
    """
    before = _last_change(graph, pooling)
    condition = _INCREASING.get(before.operation.removesuffix("_")) if before is not None else None
    if before is None or condition is None or pooling.kind != "largest" or len(before.inputs) != 1:
        return None
    if not condition(arguments(before)):
        return None
    if not before.writes:
        return Pair("activations of the largest elements", pooling, frozenset({before.id, pooling.node.id}), before.inputs,
                    lambda given: [call_again(before, _pooled(pooling, given[0]), {})[0]])  # fmt: skip
    maker = graph.producer(pooling.source)
    if maker is None or maker.writes or maker.random or len(maker.outputs) != 1:
        return None

    def compute(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        pooled = _pooled(pooling, call_again(maker, given, {})[0])
        return [call_again(before, pooled, {})[0]]

    nodes = frozenset({maker.id, before.id, pooling.node.id})
    return Pair("activations of the largest elements", pooling, nodes, maker.inputs, compute)


def _after_convolution(graph: Graph, pooling: Pooling) -> Pair | None:
    """Rewrite `avg_pool(conv1x1(x))` as `conv1x1(avg_pool(x))`."""
    before = _last_change(graph, pooling)
    if before is None or before.operation != "convolution" or pooling.kind != "average" or not pooling.inside:
        return None
    options = arguments(before)
    is_plain = set(options["stride"]) == {1} and not any(options["padding"]) and not options["transposed"]
    if not is_plain or set(graph.meta(options["weight"]).shape[2:]) != {1}:
        return None

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return call_again(before, [*_pooled(pooling, tensors[0]), *tensors[1:]], {})

    nodes = frozenset({before.id, pooling.node.id})
    return Pair("pointwise convolutions of averages", pooling, nodes, before.inputs, compute)


def _after_pooling(graph: Graph, pooling: Pooling) -> Pair | None:
    before = _last_change(graph, pooling)
    first = pooling_of(graph, before) if before is not None else None
    if first is None or first.kind != pooling.kind or not (first.inside and pooling.inside):
        return None
    if not first.window or not pooling.window or first.window != first.step:
        return None
    window = [a * b for a, b in zip(first.window, pooling.window, strict=True)]
    step = [a * b for a, b in zip(first.step, pooling.step, strict=True)]
    options = {"kernel_size": window, "stride": step}
    nodes = frozenset({first.node.id, pooling.node.id})
    return Pair("two poolings at once", pooling, nodes, first.node.inputs,
                lambda given: call_again(pooling.node, given, options)[:1])  # fmt: skip


def _pooled(pooling: Pooling, tensor: torch.Tensor) -> list[torch.Tensor]:
    return call_again(pooling.node, [tensor], {})[:1]


def _last_change(graph: Graph, pooling: Pooling) -> Node | None:
    """Return the last op that computed or wrote the value which is pooled."""
    writers = [n for n in graph.consumers(pooling.source) if pooling.source in n.writes and n.id < pooling.node.id]
    return writers[-1] if writers else graph.producer(pooling.source)
