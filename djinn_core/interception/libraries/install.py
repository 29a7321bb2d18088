"""Table of PyTorch's modules that are adapted when they are imported, each with its adapter."""

from __future__ import annotations

from djinn_core.interception.libraries import compiling, tracing
from djinn_core.interception.libraries.on_import import Adapt, adapt_on_import

_ADAPTED: dict[str, Adapt] = {
    "torch._dynamo.eval_frame": compiling.adapt_tracing,
    "torch._inductor.compile_fx": compiling.adapt_compiling,
    "torch.fx.experimental.proxy_tensor": tracing.adapt,
}


def install() -> None:
    """Tell the parts of PyTorch that are imported late of the device."""
    adapt_on_import(_ADAPTED)
