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
    "leaky_relu": lambda operands: operands.get("negative_slope", 0.01) >= 0,
    "elu": lambda operands: min(operands.get(name, 1) for name in ("alpha", "scale", "input_scale")) >= 0,
}


@attrs.frozen(eq=False)
class Pair:
    """A pooling and the op before it, with a faster way to compute their result.

    Attributes:
        name: description of the rewrite, for the reason that users see.
        pooling: the pooling.
        nodes: ids of the replaced nodes: the pooling, the op before it, and the producer of an op that works in place.
        inputs: operands of `compute`.
        compute: function from the tensors of `inputs` to a list with the pooled tensor.
    """

    name: str
    pooling: Pooling
    nodes: frozenset[int]
    inputs: tuple[int, ...]
    compute: Compute


def pair_of(graph: Graph, pooling: Pooling) -> Pair | None:
    """Return a pooling with the op before it, or None if no rewrite applies to them."""
    for rule in (_after_activation, _after_convolution, _after_pooling):
        if (pair := rule(graph, pooling)) is not None:
            return pair
    return None


def _after_activation(graph: Graph, pooling: Pooling) -> Pair | None:
    """Rewrite `max_pool(f(x))` as `f(max_pool(x))` for an increasing `f`.

    If `f` works in place, the pair includes the producer of `x`.
    """
    preceding = _last_writer(graph, pooling)
    condition = _INCREASING.get(preceding.operation.removesuffix("_")) if preceding is not None else None
    if preceding is None or condition is None or pooling.kind != "largest" or len(preceding.inputs) != 1:
        return None
    if not condition(arguments(preceding)):
        return None
    if not preceding.writes:
        return Pair("activations of the largest elements", pooling, frozenset({preceding.id, pooling.node.id}), preceding.inputs,
                    lambda operands: [call_again(preceding, _pool(pooling, operands[0]), {})[0]])  # fmt: skip
    producer = graph.producer(pooling.source)
    if producer is None or producer.writes or producer.random or len(producer.outputs) != 1:
        return None

    def compute(operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        largest = _pool(pooling, call_again(producer, operands, {})[0])
        return [call_again(preceding, largest, {})[0]]

    nodes = frozenset({producer.id, preceding.id, pooling.node.id})
    return Pair("activations of the largest elements", pooling, nodes, producer.inputs, compute)


def _after_convolution(graph: Graph, pooling: Pooling) -> Pair | None:
    """Rewrite `avg_pool(conv1x1(x))` as `conv1x1(avg_pool(x))`."""
    preceding = _last_writer(graph, pooling)
    if (
        preceding is None
        or preceding.operation != "convolution"
        or pooling.kind != "average"
        or not pooling.windows_inside
    ):
        return None
    options = arguments(preceding)
    is_plain = set(options["stride"]) == {1} and not any(options["padding"]) and not options["transposed"]
    if not is_plain or set(graph.meta(options["weight"]).shape[2:]) != {1}:
        return None

    def compute(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return call_again(preceding, [*_pool(pooling, tensors[0]), *tensors[1:]], {})

    nodes = frozenset({preceding.id, pooling.node.id})
    return Pair("pointwise convolutions of averages", pooling, nodes, preceding.inputs, compute)


def _after_pooling(graph: Graph, pooling: Pooling) -> Pair | None:
    preceding = _last_writer(graph, pooling)
    first = pooling_of(graph, preceding) if preceding is not None else None
    if first is None or first.kind != pooling.kind or not (first.windows_inside and pooling.windows_inside):
        return None
    if not first.window or not pooling.window or first.window != first.step:
        return None
    window = [a * b for a, b in zip(first.window, pooling.window, strict=True)]
    step = [a * b for a, b in zip(first.step, pooling.step, strict=True)]
    options = {"kernel_size": window, "stride": step}
    nodes = frozenset({first.node.id, pooling.node.id})
    return Pair("two poolings at once", pooling, nodes, first.node.inputs,
                lambda operands: call_again(pooling.node, operands, options)[:1])  # fmt: skip


def _pool(pooling: Pooling, tensor: torch.Tensor) -> list[torch.Tensor]:
    return call_again(pooling.node, [tensor], {})[:1]


def _last_writer(graph: Graph, pooling: Pooling) -> Node | None:
    """Return the last op that computed or wrote the pooling's input, or None for a program input that no op wrote."""
    writers = [n for n in graph.consumers(pooling.source) if pooling.source in n.writes and n.id < pooling.node.id]
    return writers[-1] if writers else graph.producer(pooling.source)
