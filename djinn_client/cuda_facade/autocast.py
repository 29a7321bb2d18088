"""`torch.autocast("cuda")`: autocasting for `cuda` is that of the remote device.

PyTorch keeps whether and in which dtype to autocast for each device type, behind a few functions that take its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME

_BY_DEVICE = ("get_autocast_dtype", "set_autocast_dtype")
_FOR_CUDA = {"get_autocast_gpu_dtype": "get_autocast_dtype", "set_autocast_gpu_dtype": "set_autocast_dtype"}


def rename() -> None:
    """Have PyTorch's state of autocasting for `cuda` be the remote device's."""
    for name in _BY_DEVICE:
        setattr(torch, name, _by_device(getattr(torch, name)))
    for old, name in _FOR_CUDA.items():
        setattr(torch, old, functools.partial(getattr(torch, name), DEVICE_NAME))
    # Without the name of a device these two mean `cuda`.
    torch.is_autocast_enabled = _enabled(torch.is_autocast_enabled)
    torch.set_autocast_enabled = _set_enabled(torch.set_autocast_enabled)


def _known(device_type: str) -> str:
    return DEVICE_NAME if device_type == "cuda" else device_type


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def by_device(device_type: str, *args: Any) -> Any:
        return function(_known(device_type), *args)

    return by_device


def _enabled(function: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(function)
    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return function(_known(device_type))

    return is_autocast_enabled


def _set_enabled(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def set_autocast_enabled(*args: Any) -> None:
        device_type, enabled = args if len(args) == 2 else ("cuda", args[0])
        function(_known(device_type), enabled)

    return set_autocast_enabled
