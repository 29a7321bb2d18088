"""A region of a template as a `torch.fx.GraphModule`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

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
)
from djinn_core.ir.operators import resolve
from djinn_core.server.compiling.region import Region
from djinn_core.server.compiling.sizes import Law, Linear
from djinn_core.server.running.template_compiler import CompiledTemplate, enumerated


def region_graph(template: CompiledTemplate, region: Region, law: Law, device: torch.device) -> fx.GraphModule:
    """The region as a graph over its inputs; numbers that follow from a size of an input are computed from it."""
    return _Maker(template, region, law, device).make()


class _Maker:
    def __init__(self, template: CompiledTemplate, region: Region, law: Law, device: torch.device) -> None:
        self.template, self.region, self.law, self.device = template, region, law, device
        self.graph = fx.Graph()
        self.nodes: dict[int, Any] = {place: self.graph.placeholder(f"x{place}") for place in region.inputs}
        self.slot = 0  # the next one to be taken
        self.n: Any = None
        self.lines: dict[Linear, Any] = {}

    def make(self) -> fx.GraphModule:
        source = self.template.source
        for index, code in enumerate(source.code[: self.region.stop]):
            form = source.forms[code]
            if index < self.region.start:
                self.slot += form.slot_count
            else:
                self._call(form, index)
        self.graph.output(tuple([self.nodes[place] for place in self.region.fresh]))
        return fx.GraphModule({}, self.graph)

    def _call(self, form: Form, index: int) -> None:
        step = self.template.steps[index]
        operands = iter([self.nodes[place] for place in step.reads])
        args = tuple([self._argument(a, operands) for a in form.args])
        kwargs = {name: self._argument(a, operands) for name, a in form.kwargs}
        result = self.graph.call_function(resolve(form.op), args, kwargs)
        for number, place in step.makes:
            taken = self.graph.call_function(operator.getitem, (result, number)) if form.sequence else result
            self.nodes[place] = taken

    def _argument(self, argument: Argument, operands: Iterator[Any]) -> Any:
        if isinstance(argument, Operand):
            return next(operands)
        if isinstance(argument, SlotArg):
            return self._slot()
        if isinstance(argument, ListArg):
            return [self._argument(item, operands) for item in argument.items]
        if isinstance(argument, ComplexSlot):
            return complex(self._slot(), self._slot())
        if isinstance(argument, ScalarTensor):
            return self._scalar_tensor(argument)
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Enumerated):
            return enumerated(argument)
        if isinstance(argument, SelfDevice):
            return torch.device("cpu") if argument.cpu else self.device
        return None  # a generator, which no op of a region uses

    def _scalar_tensor(self, argument: ScalarTensor) -> Any:
        dtype = enumerated(Enumerated("dtype", argument.dtype))
        value = complex(self._slot(), self._slot()) if dtype.is_complex else self._slot()
        make = torch.ops.aten.scalar_tensor.default
        return self.graph.call_function(make, (value,), {"dtype": dtype, "device": torch.device("cpu")})

    def _slot(self) -> Any:
        index, self.slot = self.slot, self.slot + 1
        line = self.law.slots.get(index)
        return self.law.example.slots[index] if line is None else self._line(line)

    def _line(self, line: Linear) -> Any:
        """`line` as nodes, the same for all who ask."""
        if line not in self.lines:
            value = self._base()
            if line.times != 1:
                value = self.graph.call_function(operator.mul, (value, line.times))
            if line.plus:
                value = self.graph.call_function(operator.add, (value, line.plus))
            self.lines[line] = value
        return self.lines[line]

    def _base(self) -> Any:
        if self.n is None:
            assert self.law.base is not None
            source, dimension = self.law.base
            tensor = self.nodes[self.region.inputs[source]]
            self.n = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        return self.n


def ops_of(module: fx.GraphModule) -> Sequence[str]:
    """The ops of a graph, in order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
