"""Adapters of peft whose weights the server reads, if their base model is on the remote device."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from djinn_client.interception.tensors.lazy_tensor import is_remote
from djinn_integrations.weights.open_weights import hub_address, server_weights


def adapt_adapters(module: Any) -> None:
    """Adapt `peft.peft_model`: the server reads the adapters of a model on the remote device, if it can."""
    loading: ContextVar[torch.device | None] = ContextVar("loading", default=None)
    add_adapter, load_weights = module.PeftModel.load_adapter, module.load_peft_weights

    @functools.wraps(add_adapter)
    def load_adapter(self: Any, *args: Any, **options: Any) -> Any:
        devices = {parameter.device for parameter in self.parameters()}
        before = loading.set(devices.pop() if len(devices) == 1 and all(map(is_remote, devices)) else None)
        try:
            return add_adapter(self, *args, **options)
        finally:
            loading.reset(before)

    @functools.wraps(load_weights)
    def load_peft_weights(model_id: Any, device: Any = None, key_mapping: Any = None, **options: Any) -> Any:
        remote, address = loading.get(), None if key_mapping else _address(model_id, **options)
        weights = server_weights(address, remote) if remote is not None and address is not None else None
        return load_weights(model_id, device, key_mapping, **options) if weights is None else weights.get_tensors()

    module.PeftModel.load_adapter, module.load_peft_weights = load_adapter, load_peft_weights


def _address(
    model_id: Any, subfolder: str | None = None, revision: str | None = None, force_download: bool = False, **_: Any
) -> str | None:
    """Return the server address of a hub adapter, or None for forced downloads and folders outside of the hub's cache.

    The arguments are those of peft's `load_peft_weights`.
    """
    folder = subfolder or ""
    if force_download:
        return None
    if Path(model_id).exists():
        return hub_address(Path(model_id) / folder)
    return f"hf://{model_id}@{revision or 'main'}" + (f"/{folder}" if folder else "")
