"""`torch.remote_accelerator`: what PyTorch expects of the module of an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from djinn_core.interception.current_device import current_device, set_current_device
from djinn_core.interception.lazy_tensor import DEVICE_NAME
from djinn_core.interception.port import port
from djinn_core.interception import random_state, sync


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class device:  # noqa: N801 - PyTorch calls it so
    """Context manager that changes the current index."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self.before = 0

    def __enter__(self) -> None:
        self.before = set_current_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_current_device(self.before)


def make_module() -> ModuleType:
    """The module that becomes `torch.remote_accelerator`."""
    module = ModuleType(f"torch.{DEVICE_NAME}", "The remote accelerator as a PyTorch device module.")
    members: dict[str, Any] = {
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_built": lambda: True,
        "init": lambda: None,
        "device_count": lambda: port.device_count(),
        "current_device": current_device,
        "set_device": lambda d: set_current_device(_index(d)) and None,
        "synchronize": lambda device=None: sync.synchronize(),
        "manual_seed": random_state.manual_seed,
        "manual_seed_all": random_state.manual_seed,
        "get_rng_state": lambda device=None: random_state.get_state(),
        "set_rng_state": lambda state, device=None: random_state.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "empty_cache": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
