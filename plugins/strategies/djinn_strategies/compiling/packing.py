"""Serialize a compiler's input for its worker process. Ops are sent by name, and must be on the allow-list."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch import fx

from djinn_core.errors import ProtocolError, UnsupportedOperation
from djinn_core.ir.form import Enumerated
from djinn_core.ir.operators import resolve
from djinn_core.ir.values import tensor_meta
from djinn_server.hookspecs.compilers import CompilerContext
from djinn_server.running.template_compiler import enumerated
from djinn_strategies.compiling.region import PLAIN_TEXT

_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "mul": operator.mul,
}
_SIZE: Final = "aten::sym_size.int"


class _Meta(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class _Node(msgspec.Struct, frozen=True):
    """A call of an op, with arguments that are numbers, strings or structures from `_packed`."""

    target: str
    args: list[Any]
    kwargs: dict[str, Any]


class _Packed(msgspec.Struct, frozen=True):
    nodes: list[_Node]
    outputs: list[int]
    metas: tuple[_Meta, ...]
    device: str
    writes: tuple[int, ...]
    grows: dict[int, tuple[int, ...]]
    threads: int


# Created at import: msgspec crashes if two threads inspect a new class at the same time.
_programs: msgspec.msgpack.Decoder[_Packed] = msgspec.msgpack.Decoder(_Packed)


def pack(context: CompilerContext) -> bytes:
    """Serialize `context`. `unpack` reads the bytes in another process with the same version of PyTorch.

    Raises:
        UnsupportedOperation: the graph contains something other than ATen ops on tensors and integer arithmetic.
    """
    numbers: dict[fx.Node, int] = {}
    nodes: list[_Node] = []
    outputs: list[int] = []
    for node in context.graph_module.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "call_function":
            kwargs = {name: _packed(value, numbers) for name, value in node.kwargs.items()}
            nodes.append(_Node(_name(node.target), [_packed(value, numbers) for value in node.args], kwargs))
        elif node.op == "output":
            outputs = [numbers[output] for output in node.args[0]]
        elif node.op != "placeholder":
            raise UnsupportedOperation(
                f"the graph contains a node of kind {node.op}, which cannot be sent to a compile process"
            )
    metas = tuple([_Meta(m.shape, m.stride, str(m.dtype).removeprefix("torch.")) for m in context.metas])
    request = _Packed(nodes, outputs, metas, str(context.device), context.writes, dict(context.grows), context.threads)
    return msgspec.msgpack.encode(request)


def unpack(data: bytes) -> CompilerContext:
    """Read a context that `pack` has serialized.

    Raises:
        ProtocolError: `data` is not a serialized context.
        UnsupportedOperation: the context contains an op that programs may not contain.
    """
    try:
        request = _programs.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the compile process got a request that it cannot read: {error}") from error
    graph = fx.Graph()
    nodes: list[Any] = [graph.placeholder(f"x{index}") for index in range(len(request.metas))]
    for node in request.nodes:
        args = tuple([_unpacked(value, nodes) for value in node.args])
        kwargs = {name: _unpacked(value, nodes) for name, value in node.kwargs.items()}
        nodes.append(graph.call_function(_target(node.target), args, kwargs))
    graph.output(tuple([nodes[number] for number in request.outputs]))
    metas = tuple([tensor_meta(m.shape, m.stride, 0, _dtype(m.dtype)) for m in request.metas])
    module = fx.GraphModule({}, graph)
    return CompilerContext(module, metas, torch.device(request.device), request.writes, request.grows, request.threads)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = enumerated(Enumerated("dtype", name))
    return dtype


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - the class has no public name
        return str(target.name())
    function_name = next((name for name, function in _FUNCTIONS.items() if function is target), None)
    if function_name is None:
        raise UnsupportedOperation(f"the graph calls {target}, which cannot be sent to a compile process")
    return function_name


def _target(name: str) -> Any:
    if name == _SIZE:
        return torch.ops.aten.sym_size.int
    return _FUNCTIONS[name] if name in _FUNCTIONS else resolve(name)


def _packed(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, list | tuple):
        return [_packed(item, numbers) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {kind.__name__: str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and PLAIN_TEXT.fullmatch(value))
    ):
        return value
    raise UnsupportedOperation(f"an argument is a {type(value).__name__}, which cannot be sent to a compile process")


def _unpacked(value: Any, nodes: list[Any]) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "device":
        return torch.device(content)
    if kind == "complex":
        return complex(*content)
    return enumerated(Enumerated(kind, content))
