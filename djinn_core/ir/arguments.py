"""Arguments of a call, by their names in the op's schema."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    ScalarTensor,
    SelfDevice,
    SlotArg,
    slots_taken,
)
from djinn_core.ir.graph import Node
from djinn_core.ir.operators import split_name
from djinn_core.ir.program import Slot


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of the call of `node` by their schema names, defaults included.

    Tensors appear as value ids, and numbers as numbers. Dtypes, layouts and memory formats appear by name. Devices
    appear as `device`, and generators as None.
    """
    form = node.form
    reader = _readers.get(id(form))
    if reader is None or reader[0] is not form:
        if len(_readers) >= _FORMS_LIMIT:
            _readers.clear()
        reader = _readers[id(form)] = (form, *_reader(form))
    _, defaults, readers = reader
    values = dict(defaults)
    inputs, slots = node.inputs, node.slots
    for name, read in readers:
        values[name] = read(inputs, slots)
    return values


def parameter_names(op: str) -> tuple[str, ...]:
    """Return the names of an op's parameters, in order; empty for ops that this PyTorch lacks."""
    return _parameters(op)[0]


def slot_positions(nodes: tuple[Node, ...]) -> Iterator[range]:
    """Return for each node, in program order, the positions of its slots in the program's slot list."""
    at = 0
    for node in nodes:
        yield range(at, at + len(node.slots))
        at += len(node.slots)


_FORMS_LIMIT = 16384
Read = Callable[[tuple[int, ...], tuple[int | float, ...]], Any]
# Readers by identity of the form. The entry keeps the form alive, so no other object gets its identity.
_readers: dict[int, tuple[Form, dict[str, Any], tuple[tuple[str, Read], ...]]] = {}


def _reader(form: Form) -> tuple[dict[str, Any], tuple[tuple[str, Read], ...]]:
    """Return the default arguments of a call of `form`, and a reader for each argument that the form passes."""
    names, defaults = _parameters(form.op)
    maker = _ReaderMaker(itertools.count(), itertools.count())
    readers = [
        (names[position] if position < len(names) else str(position), maker.read(argument))
        for position, argument in enumerate(form.args)
    ]
    readers += [(name, maker.read(argument)) for name, argument in form.kwargs]
    return defaults, tuple(readers)


class _ReaderMaker:
    """Create readers for arguments. Operands and slots are counted in the order of the form."""

    def __init__(self, operands: Iterator[int], slots: Iterator[int]) -> None:
        self._operands, self._slots = operands, slots
        self._kinds: dict[type, Callable[[Any], Read]] = {
            Operand: lambda _: _operand(next(self._operands)),
            SlotArg: lambda _: _slot(next(self._slots)),
            ComplexSlot: lambda _: _complex(next(self._slots), next(self._slots)),
            ScalarTensor: self._scalar,
            Constant: lambda a: _fixed(a.value),
            Enumerated: lambda a: _fixed(a.name),
            SelfDevice: lambda a: _fixed("cpu" if a.cpu else "device"),
            ListArg: lambda a: _list([self.read(item) for item in a.items]),
        }

    def read(self, argument: Argument) -> Read:
        kind = self._kinds.get(type(argument))
        return kind(argument) if kind else _fixed(None)

    def _scalar(self, argument: ScalarTensor) -> Read:
        parts = [next(self._slots) for _ in range(slots_taken(argument))]
        return _slot(parts[0]) if len(parts) == 1 else _complex(*parts)


def _operand(position: int) -> Read:
    return lambda inputs, _: inputs[position]


def _slot(position: int) -> Read:
    return lambda _, slots: slots[position]


def _complex(real: int, imaginary: int) -> Read:
    return lambda _, slots: complex(slots[real], slots[imaginary])


def _fixed(value: Any) -> Read:
    return lambda _, __: value


def _list(items: list[Read]) -> Read:
    return lambda inputs, slots: [read(inputs, slots) for read in items]


@functools.cache
def _parameters(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the parameter names of an op in order, and its defaults; empty for ops that this PyTorch lacks."""
    if not op.startswith("aten::"):
        return (), {}
    packet, overload = split_name(op)
    try:
        schema = torch._C._get_schema(f"aten::{packet}", "" if overload == "default" else overload)  # noqa: SLF001 - no public way
    except RuntimeError:
        return (), {}
    names = tuple(a.name for a in schema.arguments)
    return names, {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


_CPU = torch.device("cpu")


def call_arguments(
    form: Form, operands: Iterable[torch.Tensor], slots: Iterable[Slot], device: torch.device, cpu: torch.device = _CPU
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of a call of `form`. `device` and `cpu` are the executor's devices."""
    values, numbers = iter(operands), iter(slots)

    def value(argument: Argument) -> Any:
        match argument:
            case Operand():
                return next(values)
            case SlotArg():
                return next(numbers)
            case ComplexSlot():
                return complex(next(numbers), next(numbers))
            case ScalarTensor(dtype):
                return _scalar(getattr(torch, dtype), numbers)
            case ListArg(items):
                return [value(item) for item in items]
            case Enumerated(_, name):
                return getattr(torch, name)
            case SelfDevice(on_cpu):
                return cpu if on_cpu else device
        return argument.value if isinstance(argument, Constant) else None

    return [value(argument) for argument in form.args], {name: value(argument) for name, argument in form.kwargs}


def _scalar(dtype: torch.dtype, slots: Iterator[Slot]) -> torch.Tensor:
    number = complex(next(slots), next(slots)) if dtype.is_complex else next(slots)
    return torch.tensor(number, dtype=dtype, device="cpu")
