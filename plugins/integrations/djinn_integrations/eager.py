"""Eager execution of compiled functions and flex attention on remote tensors. A log message reports it once.

The executor chooses kernels. A compiler on this machine has no device to compile for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from djinn.hooks import Integration, get_logger, hookimpl
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote

djinn_api_version = "2.0"

_log = get_logger("djinn.interception")


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return integrations that run compiled functions and flex attention eagerly."""
    return [
        Integration("eager tracing", "torch._dynamo.eval_frame", adapt_tracing),
        Integration("eager compiling", "torch._inductor.compile_fx", adapt_compiling),
        Integration("eager flex attention", "torch.nn.attention.flex_attention", _adapt_flex_attention),
    ]


# Backends of `torch.compile` that accept remote tensors.
_traced_by: Final[list[Callable[..., Any]]] = []


def let_dynamo_trace(backend: Callable[..., Any]) -> None:
    """Make `torch.compile(backend=backend)` treat remote tensors like tensors of any device.

    With other backends, which would compile kernels for an absent device, remote programs run eagerly.
    """
    _traced_by.append(backend)


def traces(compiler: Any) -> bool:
    """Return True if the backend inside `compiler` accepts remote tensors. `compiler`: a backend with PyTorch's wrappers."""
    while inner := getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "__wrapped__", None):
        compiler = inner
    return getattr(compiler, "compiler_fn", compiler) in _traced_by


def adapt_tracing(module: Any) -> None:
    """Adapt `torch._dynamo.eval_frame`: calls with remote tensors, and methods of remote modules, run without tracing."""
    context = module.OptimizeContext
    make = context.__call__

    def compiled(self: Any, function: Any) -> Any:
        traced_function = make(self, function)
        if traces(self.callback):
            return traced_function
        if isinstance(function, torch.nn.Module) or not callable(traced_function) or isinstance(traced_function, type):
            return traced_function  # methods of modules take this path as well
        return _plain_for_remote(function, traced_function)

    context.__call__ = compiled


def _plain_for_remote(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    owner = getattr(function, "__self__", None)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_remote_module(owner) and not any(
            isinstance(a, LazyTensor) for a in pytree.tree_leaves((args, kwargs))
        ):
            return compiled(*args, **kwargs)
        _say_once()
        return function(*args, **kwargs)

    return call


def _is_remote_module(owner: Any) -> bool:
    return isinstance(owner, torch.nn.Module) and isinstance(next(owner.parameters(), None), LazyTensor)


def adapt_compiling(module: Any) -> None:
    """Adapt `torch._inductor.compile_fx`: graphs that create remote tensors without remote inputs run eagerly."""
    compile_here = module.compile_fx

    @functools.wraps(compile_here)
    def compile_fx(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_remote_tensor, [*inputs, *_values(graph)])):
            return compile_here(graph, inputs, *args, **kwargs)
        _say_once()
        return graph.forward

    module.compile_fx = compile_fx


def _values(graph: Any) -> list[Any]:
    """Return the example value of each node of a graph."""
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
    return [node.meta.get("example_value") for node in nodes]


def _is_remote_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_remote(value.device)


@functools.cache
def _say_once() -> None:
    _log.warning("torch.compile has no effect on remote tensors: the model runs op by op, with the same results")


def _adapt_flex_attention(module: Any) -> None:
    """Adapt `torch.nn.attention.flex_attention`: accept the remote device, on which it runs op by op."""
    validate = module._validate_device  # noqa: SLF001 - no public function has the list of accepted devices

    @functools.wraps(validate)
    def validate_device(query: Any, key: Any, value: Any) -> None:
        if query.device.type != DEVICE_NAME:
            validate(query, key, value)

    module._validate_device = validate_device  # noqa: SLF001 - as above
