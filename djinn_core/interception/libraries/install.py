"""Table of PyTorch's modules that are adapted when they are imported, each with its adapter."""

from __future__ import annotations

import functools
from typing import Any

from djinn_core.interception.device.device_state import DEVICE_NAME
from djinn_core.interception.libraries import compiling
from djinn_core.interception.libraries.on_import import Adapt, adapt_on_import, rebind
from djinn_core.interception.tensors.lazy_tensor import LazyTensor


def _adapt_tracer(module: Any) -> None:
    """`torch.fx.experimental.proxy_tensor` (`make_fx`): ops on remote tensors are traced.

    It leaves ops on classes that it does not know to these classes, and would put what they returned into the graph as constants.
    """
    module.HANDLED_TYPES = (*module.HANDLED_TYPES, LazyTensor)


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
    "torch._dynamo.eval_frame": compiling.adapt_tracing,
    "torch._inductor.compile_fx": compiling.adapt_compiling,
    "torch.distributed.device_mesh": _adapt_device_mesh,
    "torch.fx.experimental.proxy_tensor": _adapt_tracer,
    "torch.nn.attention.flex_attention": _adapt_flex_attention,
}


def install() -> None:
    """Tell the parts of PyTorch that are imported late of the device."""
    adapt_on_import(_ADAPTED)
