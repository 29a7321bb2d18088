"""`torch.compile`: what it captures of a remote program is recorded op by op, as without it.

The executor is where kernels are chosen; a compiler on this machine has no device to compile for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from djinn_core.interception.lazy_tensor import is_remote
from djinn_core.logs import get_logger

_log = get_logger("djinn.interception")


def adapt(module: Any) -> None:
    """`torch._inductor.compile_fx`: graphs with remote tensors run as they are."""
    compile_here = module.compile_fx

    @functools.wraps(compile_here)
    def compile_fx(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_remote_tensor, [*inputs, *_values(graph)])):
            return compile_here(graph, inputs, *args, **kwargs)
        _say_once()
        return graph.forward

    module.compile_fx = compile_fx


def _values(graph: Any) -> list[Any]:
    """Examples of what is computed in `graph`, which may make remote tensors without being given any."""
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
    return [node.meta.get("example_value") for node in nodes]


def _is_remote_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_remote(value.device)


@functools.cache
def _say_once() -> None:
    _log.warning("torch.compile does nothing for remote tensors: the model runs op by op, with the same results")
