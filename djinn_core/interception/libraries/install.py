"""Table of PyTorch's modules that are adapted when they are imported, each with its adapter."""

from __future__ import annotations

from typing import Any

from djinn_core.interception.libraries import compiling
from djinn_core.interception.libraries.on_import import Adapt, adapt_on_import
from djinn_core.interception.tensors.lazy_tensor import LazyTensor


def _adapt_tracer(module: Any) -> None:
    """`torch.fx.experimental.proxy_tensor` (`make_fx`): ops on remote tensors are traced.

    It leaves ops on classes that it does not know to these classes, and would put what they returned into the graph as constants.
    """
    module.HANDLED_TYPES = (*module.HANDLED_TYPES, LazyTensor)


_ADAPTED: dict[str, Adapt] = {
    "torch._dynamo.eval_frame": compiling.adapt_tracing,
    "torch._inductor.compile_fx": compiling.adapt_compiling,
    "torch.fx.experimental.proxy_tensor": _adapt_tracer,
}


def install() -> None:
    """Tell the parts of PyTorch that are imported late of the device."""
    adapt_on_import(_ADAPTED)
