"""Table of PyTorch's modules that are adapted when they are imported, each with its adapter.

`torch.compile` is among them: functions that are called with remote tensors run eagerly, and the log says so once. Kernels are chosen on
the executor; a compiler on this machine has no device to compile for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.libraries.on_import import Adapt, adapt_on_import, rebind
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote
from djinn_client.interception.tracing import traces
from djinn_core.logs import get_logger

_log = get_logger("djinn.interception")


def adapt_tracing(module: Any) -> None:
    """`torch._dynamo.eval_frame`: calls with remote tensors, and of methods of remote modules, are not traced."""
    context = module.OptimizeContext
    make = context.__call__

    def compiled(self: Any, function: Any) -> Any:
        made = make(self, function)
        if traces(self.callback):
            return made
        if isinstance(function, torch.nn.Module) or not callable(made) or isinstance(made, type):
            return made  # a module's method comes this way, too
        return _plain_for_remote(function, made)

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
    """`torch._inductor.compile_fx`: graphs that make remote tensors, in functions that were given none, run as they are."""
    compile_here = module.compile_fx

    @functools.wraps(compile_here)
    def compile_fx(graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_remote_tensor, [*inputs, *_values(graph)])):
            return compile_here(graph, inputs, *args, **kwargs)
        _say_once()
        return graph.forward

    module.compile_fx = compile_fx


def _values(graph: Any) -> list[Any]:
    """Examples of what is computed in `graph`."""
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
    return [node.meta.get("example_value") for node in nodes]


def _is_remote_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_remote(value.device)


@functools.cache
def _say_once() -> None:
    _log.warning("torch.compile does nothing for remote tensors: the model runs op by op, with the same results")


def _adapt_flex_attention(module: Any) -> None:
    """`torch.nn.attention.flex_attention`: its list of devices is that of those that it has kernels for; here it is made of ops."""
    validate = module._validate_device  # noqa: SLF001 - nothing public says which devices there are

    @functools.wraps(validate)
    def validate_device(query: Any, key: Any, value: Any) -> None:
        if query.device.type != DEVICE_NAME:
            validate(query, key, value)

    module._validate_device = validate_device  # noqa: SLF001 - as above


class _MeshName(str):
    """A device's name that passes for one of letters alone."""

    __slots__ = ()

    def isalpha(self) -> bool:
        return True


def _adapt_device_mesh(module: Any) -> None:
    """`torch.distributed.device_mesh`: `init_device_mesh` takes a name with anything but letters for one with an index."""
    plain = module.init_device_mesh

    @functools.wraps(plain)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return plain(_MeshName(device_type) if device_type == DEVICE_NAME else device_type, *args, **kwargs)

    rebind(plain, init_device_mesh, ("torch.distributed", "torch.testing"))


_ADAPTED: dict[str, Adapt] = {
    "torch._dynamo.eval_frame": adapt_tracing,
    "torch._inductor.compile_fx": adapt_compiling,
    "torch.distributed.device_mesh": _adapt_device_mesh,
    "torch.nn.attention.flex_attention": _adapt_flex_attention,
}


def install() -> None:
    """Tell the parts of PyTorch that are imported late of the device."""
    adapt_on_import(_ADAPTED)
