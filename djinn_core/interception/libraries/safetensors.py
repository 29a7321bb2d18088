"""safetensors: files are opened for the remote device as for any other.

Its reader knows the names of a few kinds of devices. To all others it leaves the number, which is the remote device's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from djinn_core.interception.libraries.on_import import rebind
from djinn_core.interception.tensors.batched_fetch import Together, by_handle, expecting
from djinn_core.interception.tensors.lazy_tensor import DEVICE_NAME, device_type, is_remote

_USERS = ("accelerate", "diffusers", "safetensors", "sentence_transformers", "transformers")


def adapt(module: Any) -> None:
    """`safetensors`: `safe_open` and `load_file` take `remote_accelerator:0`."""
    opened = module.safe_open

    @functools.wraps(opened, updated=())
    def safe_open(filename: Any, framework: str, device: Any = None, **options: Any) -> Any:
        if _names_remote(device):
            device = torch.device(device).index or 0
        return opened(filename, framework, **({} if device is None else {"device": device}), **options)

    rebind(opened, safe_open, _USERS)


def adapt_saving(module: Any) -> None:
    """`safetensors.torch`: what is saved is fetched in one round trip."""
    for save in (module.save, module.save_file):
        rebind(save, _fetching_together(save), _USERS)


def _fetching_together(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(tensors: Mapping[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        with expecting(Together(lambda: by_handle(tensors.values()))):
            return save(tensors, *args, **options)

    return saved


def _names_remote(device: Any) -> bool:
    if isinstance(device, torch.device):
        return is_remote(device)
    return isinstance(device, str) and device.partition(":")[0] in {DEVICE_NAME, device_type()}
