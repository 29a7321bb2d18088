"""Conversion of `torch.fx` and `torch.export` graphs to programs, which are annotated and scheduled like recorded programs.

ATen graphs with metadata of every value are read directly, for example from `torch.export.export(...)` and
`make_fx(..., tracing_mode="fake")`. Other graphs, for example from `torch.fx.symbolic_trace`, are first traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.form import (
    Argument,
    ComplexSlot,
    Constant,
    Enumerated,
    Form,
    ListArg,
    Operand,
    SelfDevice,
    SessionGenerator,
    SlotArg,
)
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import make_handle, new_storage, storage_of
from djinn_core.ir.program import Call, Program, Signature, Slot
from djinn_core.ir.values import TensorMeta, tensor_meta


def fx_graph(module: torch.nn.Module | torch.export.ExportedProgram, *inputs: Any) -> Graph:
    """Return the graph of `module`. Its `program` is the equivalent program.

    Args:
        module: a traced or exported module. Any other module is exported with `inputs`.
        *inputs: example inputs, for a graph of torch functions and modules without metadata. Only their metadata is
            used. In the graph's inputs, the parameters and buffers of `module` precede them.

    Raises:
        UnsupportedOperation: an input or a value has no metadata.
    """
    if not isinstance(module, fx.GraphModule | torch.export.ExportedProgram):
        module = torch.export.export(module, inputs)
    graph_module = module.graph_module if isinstance(module, torch.export.ExportedProgram) else module
    if not is_lowered(graph_module):
        graph_module = lower(graph_module, inputs)
    reader = _FxReader(graph_module)
    for node in graph_module.graph.nodes:
        reader.read(node)
    return Graph(reader.program(), reader.modules)


@attrs.define
class _FxReader:
    """Read an FX graph node by node.

    Attributes:
        values: by FX node, a handle, a tuple of handles, or a number.
    """

    owner: fx.GraphModule
    values: dict[fx.Node, Any] = attrs.field(factory=dict)
    metas: dict[int, TensorMeta] = attrs.field(factory=dict)
    views: dict[int, int] = attrs.field(factory=dict)
    storages: dict[int, int] = attrs.field(factory=dict)
    forms: dict[Form, Signature] = attrs.field(factory=dict)
    calls: list[Call] = attrs.field(factory=list)
    operands: list[int] = attrs.field(factory=list)
    slots: list[Slot] = attrs.field(factory=list)
    modules: dict[int, str] = attrs.field(factory=dict)
    kept_alive: set[int] = attrs.field(factory=set)
    result_handles: list[int] = attrs.field(factory=list)

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self._input(_value(node))
        elif node.op == "get_attr":
            self.values[node] = self._input(_attribute(self.owner, str(node.target)))
        elif node.op == "output":
            self.kept_alive.update(h for n in node.all_input_nodes for h in _handles(self.values[n]))
        elif node.op == "call_function":
            self._function(node)
        else:
            raise UnsupportedOperation(
                f"FX node {node.name!r} is a {node.op}: only graphs of ATen ops can be read; "
                "make the graph with torch.export.export or make_fx"
            )

    def program(self) -> Program:
        """Return the program of the nodes read so far. Values that are not outputs are dead at its end."""
        dead = frozenset(h for h in self.result_handles if h not in self.kept_alive)
        return Program(tuple(self.calls), tuple(self.operands), tuple(self.slots), dead)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._handle(self._storage(value), value)

    def _storage(self, tensor: torch.Tensor) -> int:
        key = _storage_key(tensor)
        return self.storages.setdefault(key, new_storage()) if key else new_storage()

    def _handle(self, storage: int, tensor: torch.Tensor) -> int:
        view = self.views[storage] = self.views.get(storage, -1) + 1
        handle = make_handle(storage, view)
        self.metas[handle] = _meta(tensor)
        return handle

    def _function(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index] if isinstance(source, fx.Node) else None
        elif isinstance(node.target, OpOverload):
            self._op(node, node.target)
        elif isinstance(_value(node), torch.Tensor):
            raise UnsupportedOperation(
                f"FX node {node.name!r} calls {node.target}, which is not an ATen op; make the graph with torch.export.export or make_fx"
            )
        else:
            self.values[node] = _number(_value(node))  # arithmetic on sizes

    def _op(self, node: fx.Node, func: OpOverload) -> None:
        value = _value(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            self.values[node] = _number(value)
            return
        scalars = _CallScalars(self.values)
        args = tuple(scalars.argument(a) for a in node.args)
        kwargs = tuple((n, scalars.argument(v)) for n, v in node.kwargs.items() if n != "pin_memory")
        sequence = isinstance(value, (tuple, list))
        results = [self._outcome(func, i, r, scalars.handles) for i, r in enumerate(value if sequence else [value])]
        new = [r.handle for r in results if r.kind == "new" and r.handle is not None]
        form = Form(func.name(), args, kwargs, tuple(r.kind for r in results), sequence)
        self.modules[len(self.calls)] = _module_path(node)
        self.calls.append(
            Call(
                signature=self.forms.setdefault(form, Signature(form, ())),
                operands=tuple(self.metas[h] for h in scalars.handles),
                results=tuple(r.meta for r in results),
                aliases=tuple(r.alias for r in results),
                inplace=tuple(r.inplace for r in results),
                writes=tuple(_written_operands(func, node, self.values)),
                random=_is_random(func, node),
                operand_count=len(scalars.handles),
                slot_count=len(scalars.slots),
                new_count=len(new),
                nbytes=tuple(r.nbytes for r in results),
            )
        )
        self.operands += [*scalars.handles, *new]
        self.slots += scalars.slots
        self.result_handles += new
        self.values[node] = tuple(r.handle for r in results) if sequence else results[0].handle

    def _outcome(self, func: OpOverload, index: int, result: Any, operands: list[int]) -> _Outcome:
        if not isinstance(result, torch.Tensor):
            return _Outcome("none")
        meta, nbytes = _meta(result), int(_number(result.untyped_storage().nbytes()))
        inplace = _written_result(func, index, operands)
        if inplace >= 0:
            return _Outcome("none", operands[inplace], meta, inplace, inplace, nbytes)
        storage = self.storages.get(_storage_key(result))
        alias = next((i for i, h in enumerate(operands) if storage_of(h) == storage), -1)
        if alias < 0:
            storage = self.storages[_storage_key(result)] = new_storage()
        return _Outcome("new", self._handle(storage or 0, result), meta, -1, alias, nbytes)


@attrs.frozen
class _Outcome:
    """A result of a call. `inplace`, `alias`: index of the operand that it is or aliases, or -1."""

    kind: Literal["new", "none"]
    handle: int | None = None
    meta: TensorMeta | None = None
    inplace: int = -1
    alias: int = -1
    nbytes: int = 0


@attrs.define
class _CallScalars:
    values: Mapping[fx.Node, Any]
    handles: list[int] = attrs.field(factory=list)
    slots: list[Slot] = attrs.field(factory=list)

    def argument(self, a: Any) -> Argument:
        if isinstance(a, fx.Node):
            return self._node(a)
        if a is None or isinstance(a, (bool, str)):
            return Constant(a)
        if isinstance(a, (int, float)):
            self.slots.append(a)
            return SlotArg()
        if isinstance(a, complex):
            self.slots += [a.real, a.imag]
            return ComplexSlot()
        if isinstance(a, (list, tuple)):
            return ListArg(tuple(self.argument(item) for item in a))
        return _rare(a)

    def _node(self, node: fx.Node) -> Argument:
        value = self.values[node]
        if isinstance(value, (int, float)) and not isinstance(_value(node), torch.Tensor):
            return self.argument(value)
        if isinstance(value, tuple):
            self.handles += value
            return ListArg(tuple(Operand() for _ in value))
        self.handles.append(value)
        return Operand()


def _rare(a: Any) -> Argument:
    if isinstance(a, torch.dtype):
        return Enumerated("dtype", str(a).removeprefix("torch."))
    if isinstance(a, torch.layout):
        return Enumerated("layout", str(a).removeprefix("torch."))
    if isinstance(a, torch.memory_format):
        return Enumerated("memory_format", str(a).removeprefix("torch."))
    if isinstance(a, torch.device):
        return SelfDevice()
    if isinstance(a, torch.Generator):
        return SessionGenerator()
    raise UnsupportedOperation(f"an argument of type {type(a).__name__} cannot be part of a program")


def _value(node: fx.Node) -> Any:
    """Return the result of `node`, as fake tensors or symbolic numbers."""
    if "val" in node.meta:
        return node.meta["val"]
    outcome = node.target is operator.getitem or node.op == "output"
    schema = getattr(node.target, "_schema", None)
    if outcome or (schema is not None and not schema.returns):
        return None
    raise UnsupportedOperation(
        f"FX node {node.name!r} has no metadata; make the graph with torch.export.export or make_fx(tracing_mode='fake')"
    )


def _number(value: Any) -> int | float | bool:
    """Return the number that a symbolic size had when the graph was traced."""
    node = getattr(value, "node", None)
    number: int | float | bool | None = value if node is None else node.hint
    if number is None:
        raise UnsupportedOperation(f"the size {value} depends on data, so the graph cannot be planned before it runs")
    return number


def _meta(tensor: torch.Tensor) -> TensorMeta:
    """Return the metadata of a fake tensor, with symbolic sizes as numbers."""
    return tensor_meta(
        tuple(int(_number(n)) for n in tensor.shape),
        tuple(int(_number(n)) for n in tensor.stride()),
        int(_number(tensor.storage_offset())),
        tensor.dtype,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )


def _attribute(owner: fx.GraphModule, path: str) -> Any:
    target: Any = owner
    for part in path.split("."):
        target = getattr(target, part)
    return target


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage has no public name


def _leaves(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _leaves(item)
    else:
        yield argument


def _handles(value: Any) -> Iterator[int]:
    return (h for h in _leaves(value) if isinstance(h, int) and not isinstance(h, bool))


def _schema(func: OpOverload) -> torch.FunctionSchema:
    return func._schema  # noqa: SLF001 - schemas have no public name


def _arguments(func: OpOverload, node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    schema = _schema(func).arguments
    yield from zip(schema, node.args, strict=False)
    by_name = {a.name: a for a in schema}
    yield from ((by_name[n], v) for n, v in node.kwargs.items())


def _tensor_nodes(argument: Any, values: Mapping[fx.Node, Any]) -> int:
    nodes = (
        a for a in _leaves(argument) if isinstance(a, fx.Node) and isinstance(_value(a), (torch.Tensor, list, tuple))
    )
    return sum(len(values[n]) if isinstance(values[n], tuple) else 1 for n in nodes)


def _written_operands(func: OpOverload, node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[int]:
    """Return the positions of the operands that the schema marks as written."""
    position = 0
    for argument, value in _arguments(func, node):
        count = _tensor_nodes(value, values)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from range(position, position + count)
        position += count


def _written_result(func: OpOverload, index: int, operands: list[int]) -> int:
    """Return the position of the written operand that result `index` returns, or -1 if the result is a new tensor."""
    returns = _schema(func).returns
    info = returns[index].alias_info if index < len(returns) else None
    if info is None or not info.is_write or not operands:
        return -1
    for position, argument in enumerate(_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == info.before_set:
            return position if position < len(operands) and not argument.kwarg_only else len(operands) - 1
    return -1


def _is_random(func: OpOverload, node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = {a.name: v for a, v in _arguments(func, node)}
    dropout = values.get("dropout_p", values.get("p"))
    return not (
        values.get("train") is False or values.get("training") is False or ("dropout_p" in values and not dropout)
    )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("", None))[0] if stack else ""
    path = str(path).removeprefix("traced.")
    return path.removeprefix("L['self'].").removeprefix("L__self___")


_EXAMPLES = ("val", "example_value")


def is_lowered(module: fx.GraphModule) -> bool:
    """Return True if a graph calls only ATen ops and arithmetic on sizes."""
    return not any(_is_torch_level(node) for node in module.graph.nodes)


def _is_torch_level(node: fx.Node) -> bool:
    """Return True if a node calls a torch function, method or module that must be lowered to ATen ops."""
    if node.op in {"call_module", "call_method"}:
        return True
    if node.op != "call_function" or isinstance(node.target, OpOverload) or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def lower(module: fx.GraphModule, inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Return the graph lowered to ATen ops, by tracing it on fake tensors. Parameters and buffers are its first inputs.

    Raises:
        UnsupportedOperation: the graph has no metadata, and no example inputs are given.
    """
    running = _AttributedRun(module)
    tensors = {**dict(running.named_parameters()), **dict(running.named_buffers())}
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    inputs = tuple(inputs) or tuple(_example(node, device) for node in module.graph.nodes if node.op == "placeholder")

    def run(tensors: dict[str, torch.Tensor], *inputs: Any) -> Any:
        with preserve_node_meta():
            return torch.func.functional_call(running, tensors, inputs)

    with torch.no_grad():
        return make_fx(run, tracing_mode="fake", pre_dispatch=True)(tensors, *inputs)


class _AttributedRun(torch.nn.Module):
    """A module that runs a graph node by node, so that traced ops are attributed to the modules of the nodes."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, *inputs: Any) -> Any:
        return fx.Interpreter(self.traced).run(*inputs)


def _example(node: fx.Node, device: torch.device) -> Any:
    for name in _EXAMPLES:
        if name in node.meta:
            return node.meta[name]
    meta = node.meta.get("tensor_meta")
    if meta is not None:  # metadata by torch.fx.passes.shape_prop
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    if node.args:
        return node.args[0]  # default of an argument
    raise UnsupportedOperation(
        f"the input {node.name!r} has no metadata: give example inputs, fx_graph(module, *inputs), or make the graph "
        "with torch.export.export or make_fx(tracing_mode='fake')"
    )
