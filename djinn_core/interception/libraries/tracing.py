"""PyTorch's tracer (`make_fx`) takes remote tensors for what they are: tensors of a device, not some wrapper's.

It leaves ops on classes that it does not know to these classes, and would put what they returned into the graph as constants.
"""

from __future__ import annotations

from typing import Any

from djinn_core.interception.tensors.lazy_tensor import LazyTensor


def adapt(module: Any) -> None:
    """`torch.fx.experimental.proxy_tensor`: ops on remote tensors are traced."""
    module.HANDLED_TYPES = (*module.HANDLED_TYPES, LazyTensor)
