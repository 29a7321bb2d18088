"""The backend `djinn` of `torch.compile`. PyTorch imports this module at first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from djinn_integrations.dynamo.graph import RecordedGraph
from djinn_integrations.eager import let_dynamo_trace

Compiled = Callable[..., Any]


def djinn(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Return a function that computes `graph_module`. From its second call on, it records the graph in one step."""
    if torch.is_grad_enabled() and any(isinstance(i, torch.Tensor) and i.requires_grad for i in example_inputs):
        return _differentiable(graph_module, example_inputs)
    return RecordedGraph(graph_module)


def _boxed(graph_module: torch.fx.GraphModule, _: Sequence[Any]) -> Compiled:
    graph = RecordedGraph(graph_module)

    def run(inputs: list[Any]) -> Any:
        operands = list(inputs)
        inputs.clear()  # AOTAutograd donates its inputs
        return graph(*operands)

    run._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - AOTAutograd then hands over its inputs as one list
    return run


_differentiable: Callable[..., Compiled] = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed)

let_dynamo_trace(djinn)
