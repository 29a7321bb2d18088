"""Files are opened for the remote device as for any other.

The reader of safetensors knows the names of a few kinds of devices. To all others it leaves the number, which is the remote
device's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from djinn.libraries import DEVICE_NAME, device_type, fetched_together, is_remote, rebind

_USERS = ("accelerate", "diffusers", "safetensors", "sentence_transformers", "transformers")


def adapt_reading(module: Any) -> None:
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
        with fetched_together(tensors.values()):
            return save(tensors, *args, **options)

    return saved


def _names_remote(device: Any) -> bool:
    if isinstance(device, torch.device):
        return is_remote(device)
    return isinstance(device, str) and device.partition(":")[0] in {DEVICE_NAME, device_type()}
