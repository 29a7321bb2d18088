"""The arguments of a call by name, as the op's schema names them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

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
from djinn_core.ir.graph import Node
from djinn_core.ir.operators import split_name


def arguments(node: Node) -> dict[str, Any]:
    """What `node` was called with, by the names in the op's schema, defaults included.

    Tensors appear as value ids, numbers as numbers, dtypes and the like by name, devices as `device`, generators as None.
    A node without a form has none.
    """
    if node.form is None:
        return {}
    names, defaults = _parameters(node.op)
    unpack = _Unpacking(iter(node.inputs), iter(node.slots)).unpack
    given = dict(defaults)
    for position, argument in enumerate(node.form.args):
        given[names[position] if position < len(names) else str(position)] = unpack(argument)
    for name, argument in node.form.kwargs:
        given[name] = unpack(argument)
    return given


def slot_positions(nodes: tuple[Node, ...]) -> Iterator[range]:
    """For each node, in program order, the positions of its slots in the program's slot list."""
    at = 0
    for node in nodes:
        yield range(at, at + len(node.slots))
        at += len(node.slots)


class _Unpacking:
    """Takes operands and slots in the order in which a form mentions them."""

    def __init__(self, operands: Iterator[int], slots: Iterator[int | float]) -> None:
        self._operands, self._slots = operands, slots
        self._kinds: dict[type, Callable[[Any], Any]] = {
            Operand: lambda _: next(self._operands),
            SlotArg: lambda _: next(self._slots),
            ComplexSlot: lambda _: complex(next(self._slots), next(self._slots)),
            ScalarTensor: self._scalar,
            Constant: lambda a: a.value,
            Enumerated: lambda a: a.name,
            SelfDevice: lambda a: "cpu" if a.cpu else "device",
            ListArg: lambda a: [self.unpack(item) for item in a.items],
        }

    def unpack(self, argument: Argument) -> Any:
        kind = self._kinds.get(type(argument))
        return kind(argument) if kind else None

    def _scalar(self, argument: ScalarTensor) -> Any:
        parts = [next(self._slots) for _ in range(slots_taken(argument))]
        return parts[0] if len(parts) == 1 else complex(*parts)


@functools.cache
def _parameters(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Parameter names of an op in order, and its defaults; nothing for ops that this PyTorch does not have."""
    if not op.startswith("aten::"):
        return (), {}
    packet, overload = split_name(op)
    try:
        schema = torch._C._get_schema(f"aten::{packet}", "" if overload == "default" else overload)  # noqa: SLF001 - no public way
    except RuntimeError:
        return (), {}
    names = tuple(a.name for a in schema.arguments)
    return names, {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
