"""Adapters for libraries that choose a device where the user names none."""

from __future__ import annotations

import functools
from typing import Any

from djinn_core.interception.libraries.choice import is_the_only_accelerator
from djinn_core.interception.libraries.on_import import rebind
from djinn_core.interception.tensors.lazy_tensor import DEVICE_NAME, logical_device


def adapt_pipeline(module: Any) -> None:
    """`transformers.pipelines.base`: `device=0`, and no device, are the remote one, as they are the GPU elsewhere."""
    made = module.Pipeline.__init__

    @functools.wraps(made)
    def make(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        placed = device is None and getattr(model, "hf_device_map", None) is not None
        if not placed and (device is None or (isinstance(device, int) and device >= 0)) and is_the_only_accelerator():
            device = logical_device(device or 0)
        made(self, model, *args, device=device, **kwargs)

    module.Pipeline.__init__ = make


def adapt_sentence_transformers(module: Any) -> None:
    """`sentence_transformers.util`: models that are told no device go to the remote one."""
    chosen = module.get_device_name

    @functools.wraps(chosen)
    def get_device_name() -> str:
        name: str = chosen()
        return f"{DEVICE_NAME}:0" if name == "cpu" and is_the_only_accelerator() else name

    rebind(chosen, get_device_name, ("sentence_transformers",))
