"""The call of a node on tensors without data: what PyTorch's own formulas are asked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
    slots_taken,
)
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.values import TensorMeta

META = torch.device("meta")


def meta_call(graph: Graph, node: Node) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of `node`, with tensors on the meta device.

    A node without a form was called with its inputs and then its slots.
    """
    if node.form is None:
        return [*(meta_tensor(graph.meta(v)) for v in node.inputs), *node.slots], {}
    unpack = _Unpacking(graph, iter(node.inputs), iter(node.slots)).unpack
    return [unpack(a) for a in node.form.args], {name: unpack(a) for name, a in node.form.kwargs}


def meta_results(graph: Graph, node: Node) -> Any:
    """Results of `node` on the meta device: a tensor, or a list with None if there is no new value."""
    made = [meta_tensor(graph.meta(v)) for v in node.outputs or node.writes[-1:]]
    if node.form is None or not node.form.sequence:
        return made[0] if made else None
    rest = iter(made)
    return [next(rest, None) if kind == "new" else None for kind in node.form.results]


def meta_tensor(meta: TensorMeta) -> torch.Tensor:
    """A tensor of that metadata, without data."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=META)


@attrs.define
class _Unpacking:
    """Takes operands and slots in the order in which a form mentions them."""

    graph: Graph
    operands: Iterator[int]
    slots: Iterator[int | float]

    def unpack(self, argument: Argument) -> Any:
        kind = _KINDS.get(type(argument))
        return kind(self, argument) if kind else None

    def scalar_tensor(self, argument: ScalarTensor) -> torch.Tensor:
        for _ in range(slots_taken(argument)):
            next(self.slots)
        return torch.empty((), dtype=getattr(torch, argument.dtype), device=META)


_KINDS: dict[type, Callable[[_Unpacking, Any], Any]] = {
    Operand: lambda call, _: meta_tensor(call.graph.meta(next(call.operands))),
    SlotArg: lambda call, _: next(call.slots),
    ComplexSlot: lambda call, _: complex(next(call.slots), next(call.slots)),
    ScalarTensor: _Unpacking.scalar_tensor,
    Constant: lambda _, argument: argument.value,
    Enumerated: lambda _, argument: getattr(torch, argument.name),
    SelfDevice: lambda _, __: META,
    ListArg: lambda call, argument: [call.unpack(item) for item in argument.items],
}
