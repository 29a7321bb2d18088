"""Convert the region of a compilation job to a `torch.fx.GraphModule`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
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
from djinn_core.ir.values import TensorMeta
from djinn_server.running.template_compiler import enumerated
from djinn_strategies.compiling.hot_template import CompilationJob
from djinn_strategies.compiling.scalars import call_with_tensors
from djinn_strategies.compiling.sizes import LinearSize
from djinn_strategies.compiling.written_views import WrittenView


def region_graph(job: CompilationJob, device: torch.device) -> fx.GraphModule:
    """Return a job's region as an FX graph. The graph computes varying numbers from the size of an input."""
    return _RegionGraphBuilder(job, device).build()


class _RegionGraphBuilder:
    def __init__(self, job: CompilationJob, device: torch.device) -> None:
        self.template, self.region, self.relation, self.device = job.template, job.region, job.relation, device
        self.graph = fx.Graph()
        self.nodes: dict[int, Any] = {place: self.graph.placeholder(f"x{place}") for place in self.region.inputs}
        self.floats = self.graph.placeholder("floats") if self.relation.float_slots else None
        self._add_written_views(job.aliases)
        places = zip(self.region.inputs, self.relation.example.metas, strict=True)
        self._empty = [self.nodes[place] for number, (place, meta) in enumerate(places) if self._is_empty(number, meta)]
        self.takes_float = False  # True if the current call takes one of the floats
        self.next_slot = 0  # index of the next slot
        self.n: Any = None
        self.expressions: dict[LinearSize, Any] = {}

    def _add_written_views(self, aliases: Iterable[WrittenView]) -> None:
        inputs, metas = self.region.inputs, self.relation.example.metas
        for alias in aliases:
            base, meta = self.nodes[inputs[alias.base]], metas[alias.view]
            view = (base, list(meta.shape), list(meta.stride), alias.offset)
            self.nodes[inputs[alias.view]] = self.graph.call_function(torch.ops.aten.as_strided.default, view)

    def _is_empty(self, number: int, meta: TensorMeta) -> bool:
        return meta.shape == (0,) and number not in self.relation.sizes

    def build(self) -> fx.GraphModule:
        source = self.template.source
        for index, code in enumerate(source.code[: self.region.stop]):
            form = source.forms[code]
            if index < self.region.start:
                self.next_slot += form.slot_count
            else:
                self._add_call(form, index)
        self.graph.output(tuple([self.nodes[place] for place in self.region.owned_results]))
        return fx.GraphModule({}, self.graph)

    def _add_call(self, form: Form, index: int) -> None:
        step = self.template.steps[index]
        operands = iter([self.nodes[place] for place in step.reads])
        self.takes_float = False
        args = tuple([self._argument(a, operands) for a in form.args])
        kwargs = {name: self._argument(a, operands) for name, a in form.kwargs}
        if form.op == "aten::cat" and not kwargs:
            result = self._concatenate(*args)
        elif self.takes_float:
            result = call_with_tensors(form.op, args, kwargs, self.graph.call_function)
        else:
            result = self.graph.call_function(resolve(form.op), args, kwargs)
        for number, place in step.makes:
            self.nodes[place] = self._list_item(result, number) if form.sequence else result

    def _concatenate(self, tensors: Sequence[Any], *dimension: Any) -> Any:
        """Return a concatenation without the empty tensors, such as a KV cache before its first token.

        They are left out because with them, inductor would choose another layout for the result.
        """
        nonempty = [tensor for tensor in tensors if tensor not in self._empty]
        if len(nonempty) == 1:
            clone = torch.ops.aten.clone.default
            return self.graph.call_function(clone, (*nonempty,), {"memory_format": torch.contiguous_format})
        return self.graph.call_function(torch.ops.aten.cat.default, (nonempty or tensors, *dimension))

    def _list_item(self, result: Any, number: int) -> Any:
        if isinstance(result, list):
            return result[number]
        return self.graph.call_function(operator.getitem, (result, number))

    def _argument(self, argument: Argument, operands: Iterator[Any]) -> Any:
        if isinstance(argument, Operand):
            return next(operands)
        if isinstance(argument, SlotArg):
            return self._take_slot()
        if isinstance(argument, ListArg):
            return [self._argument(item, operands) for item in argument.items]
        if isinstance(argument, ComplexSlot):
            return complex(self._take_slot(), self._take_slot())
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
        value = complex(self._take_slot(), self._take_slot()) if dtype.is_complex else self._take_slot()
        make = torch.ops.aten.scalar_tensor.default
        return self.graph.call_function(make, (value,), {"dtype": dtype, "device": torch.device("cpu")})

    def _take_slot(self) -> Any:
        index, self.next_slot = self.next_slot, self.next_slot + 1
        if index in self.relation.float_slots:
            self.takes_float = True
            place = self.relation.float_slots.index(index)
            return self.graph.call_function(torch.ops.aten.select.int, (self.floats, 0, place))
        line = self.relation.slots.get(index)
        return self.relation.example.slots[index] if line is None else self._expression(line)

    def _expression(self, line: LinearSize) -> Any:
        """Return the node that computes `line`. Equal lines share a node."""
        if line not in self.expressions:
            value = self._base_size()
            if line.times != 1:
                value = self.graph.call_function(operator.mul, (value, line.times))
            if line.plus:
                value = self.graph.call_function(operator.add, (value, line.plus))
            self.expressions[line] = value
        return self.expressions[line]

    def _base_size(self) -> Any:
        if self.n is None:
            assert isinstance(self.relation.base, tuple)
            source, dimension = self.relation.base
            tensor = self.nodes[self.region.inputs[source]]
            self.n = self.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dimension))
        return self.n
