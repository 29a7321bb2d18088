"""`torch.remote_accelerator`: what PyTorch expects of the module of an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from djinn_core.interception import random_state, sync
from djinn_core.interception.current_device import current_device, existing_index, set_current_device
from djinn_core.interception.lazy_tensor import DEVICE_NAME
from djinn_core.interception.port import port


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    return existing_index(torch.device(DEVICE_NAME, device) if isinstance(device, int) else torch.device(device))


class device:  # noqa: N801 - PyTorch calls it so
    """Context manager that changes the current index."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self.before = 0

    def __enter__(self) -> None:
        self.before = set_current_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_current_device(self.before)


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The random state, as a CPU tensor of bytes; one round trip. All indexes share one."""
    return random_state.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Go on from `state`."""
    random_state.set_state(state)


def synchronize(device: Any = None) -> None:
    """Wait until everything that was recorded has run."""
    sync.synchronize()


def set_device(device: Any) -> None:
    """Make an index the present thread's."""
    set_current_device(_index(device))


def device_count() -> int:
    """How many indexes there are."""
    return port.device_count()


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that used the device."""
    return port.forked


def yes() -> bool:
    """Available, built and initialised: the device starts what it needs at first use."""
    return True


def nothing() -> None:
    """There is nothing to do."""


def make_module() -> ModuleType:
    """The module that becomes `torch.remote_accelerator`."""
    module = ModuleType(f"torch.{DEVICE_NAME}", "The remote accelerator as a PyTorch device module.")
    members: dict[str, Any] = {
        "device": device,
        "is_available": yes,
        "is_initialized": yes,
        "_initialized": True,  # activation checkpointing looks here before it keeps the random state
        "is_built": yes,
        "is_bf16_supported": yes,
        "init": nothing,
        "empty_cache": nothing,
        "_lazy_init": nothing,
        "device_count": device_count,
        "current_device": current_device,
        "set_device": set_device,
        "synchronize": synchronize,
        "manual_seed": random_state.manual_seed,
        "manual_seed_all": random_state.manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": is_in_bad_fork,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
