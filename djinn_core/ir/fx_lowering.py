"""Lowering of FX graphs of torch functions and modules, from `torch.fx.symbolic_trace` or Dynamo, to graphs of ATen ops."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from djinn_core.errors import UnsupportedOperation

_EXAMPLES = ("val", "example_value")


def is_lowered(module: fx.GraphModule) -> bool:
    """True if a graph calls only ATen ops and arithmetic on sizes."""
    return not any(_is_torch_level(node) for node in module.graph.nodes)


def _is_torch_level(node: fx.Node) -> bool:
    """True if a node calls a torch function, method or module that has yet to be lowered to ATen ops."""
    if node.op in {"call_module", "call_method"}:
        return True
    if node.op != "call_function" or isinstance(node.target, OpOverload) or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def lowered(module: fx.GraphModule, inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """The same graph in ATen ops, traced anew on fake tensors; parameters and buffers come first among its inputs.

    Raises:
        UnsupportedOperation: the graph has no metadata, and no inputs are given that it could be made with.
    """
    running = _Running(module)
    tensors = {**dict(running.named_parameters()), **dict(running.named_buffers())}
    device = next((t.device for t in tensors.values()), torch.device("cpu"))
    inputs = tuple(inputs) or tuple(_example(node, device) for node in module.graph.nodes if node.op == "placeholder")

    def run(tensors: dict[str, torch.Tensor], *inputs: Any) -> Any:
        with preserve_node_meta():
            return torch.func.functional_call(running, tensors, inputs)

    with torch.no_grad():
        return make_fx(run, tracing_mode="fake", pre_dispatch=True)(tensors, *inputs)


class _Running(torch.nn.Module):
    """Runs a graph node by node, so that ops traced meanwhile are attributed to the modules of the nodes."""

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
    if meta is not None:  # what torch.fx.passes.shape_prop leaves
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    if node.args:
        return node.args[0]  # the default of an argument
    raise UnsupportedOperation(
        f"nothing is known of the input {node.name!r}: give example inputs, fx_graph(module, *inputs), or make the graph "
        "with torch.export.export or make_fx(tracing_mode='fake')"
    )
