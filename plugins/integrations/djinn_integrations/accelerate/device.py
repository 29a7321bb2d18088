"""The device that Accelerate chooses, and how much memory it has.

Accelerate asks for one kind of accelerator after another by name and ends with the CPU. There it now finds the remote
device; a machine with another accelerator, and a program that asks for the CPU (`Accelerator(cpu=True)`), see no change.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from djinn.hooks import rebind
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_integrations import is_the_only_accelerator

_CPU = torch.device("cpu")
_LIBRARIES = ("accelerate", "diffusers", "transformers")
MemoryByDevice = dict[int | str, int | str]


def adapt_state(module: Any) -> None:
    """`accelerate.state`: `PartialState().device`, unless the program asks for the CPU or there is another accelerator."""
    chosen = module.PartialState.default_device.fget

    def default_device(state: Any) -> torch.device:
        device: torch.device = chosen(state)
        return logical_device(0) if device == _CPU else device

    module.PartialState.default_device = property(default_device)


def adapt_modeling(module: Any) -> None:
    """`accelerate.utils.modeling`: `device_map="auto"` knows the remote device by its number, as it knows GPUs."""
    measured = module.get_max_memory

    @functools.wraps(measured)
    def get_max_memory(max_memory: MemoryByDevice | None = None) -> MemoryByDevice:
        if max_memory is None:
            found: MemoryByDevice = measured()
            return found if set(found) != {"cpu"} else {0: _free_bytes(), **found}
        for device, size in max_memory.items():  # in place, as transformers expects
            max_memory[device] = module.convert_file_size_to_int(size) if isinstance(size, str) else size
        ours = {device: size for device, size in sorted(max_memory.items(), key=str) if _is_ours(device)}
        return {**ours, **measured({device: size for device, size in max_memory.items() if device not in ours})}

    rebind(measured, get_max_memory, _LIBRARIES)


def _is_ours(device: int | str) -> bool:
    """True if accelerate would look for `device` among the GPUs of this machine, which has none."""
    return isinstance(device, int) and is_the_only_accelerator()


def _free_bytes() -> int:
    """Free bytes on the remote device; the largest integer where the device does not tell."""
    measure = getattr(getattr(torch, DEVICE_NAME), "mem_get_info", None)
    return sys.maxsize if measure is None else int(measure(0)[0])
