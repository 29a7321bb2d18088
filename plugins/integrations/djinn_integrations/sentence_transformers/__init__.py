"""Adapters for sentence-transformers: it chooses the remote device, and the server reads the weights of remote models."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch

from djinn.hooks import Integration, hookimpl, rebind
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_integrations import is_the_only_accelerator
from djinn_integrations.weights.open_weights import whole_device

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the module that chooses the device, and the module that loads models."""
    return [
        Integration("sentence_transformers device", "sentence_transformers.util", adapt_util),
        Integration("sentence_transformers models", "sentence_transformers.base.model", adapt_models),
    ]


def adapt_util(module: Any) -> None:
    """Adapt `sentence_transformers.util`: the default device is the remote device."""
    device_name = module.get_device_name

    @functools.wraps(device_name)
    def get_device_name() -> str:
        name: str = device_name()
        return f"{DEVICE_NAME}:0" if name == "cpu" and is_the_only_accelerator() else name

    rebind(device_name, get_device_name, ("sentence_transformers",))


def adapt_models(module: Any) -> None:
    """Adapt `sentence_transformers.base.model`: models for the remote device are loaded directly onto it."""
    going_to: ContextVar[torch.device | None] = ContextVar("going_to", default=None)
    initialize, load_model = module.BaseModel.__init__, module.Transformer._load_model

    @functools.wraps(initialize)
    def make(self: Any, *args: Any, device: Any = None, **options: Any) -> None:
        target = module.get_device_name() if device is None else device
        # Without accelerate, transformers accepts no device map.
        before = going_to.set(whole_device(target) if find_spec("accelerate") is not None else None)
        try:
            initialize(self, *args, device=device, **options)
        finally:
            going_to.reset(before)

    @functools.wraps(load_model)
    def load(self: Any, path: Any, task: Any, config: Any, backend: str, *args: Any, **options: Any) -> Any:
        device = going_to.get()
        if device is not None and backend == "torch" and options.get("device_map") is None:
            options["device_map"] = device
        return load_model(self, path, task, config, backend, *args, **options)

    module.BaseModel.__init__, module.Transformer._load_model = make, load
