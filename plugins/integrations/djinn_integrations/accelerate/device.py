"""The device that Accelerate chooses, and its memory size.

Accelerate checks each kind of accelerator by name and falls back to the CPU. With this adapter, it falls back to the remote device.
Nothing changes on machines with another accelerator, and in programs that request the CPU (`Accelerator(cpu=True)`).
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
    """Adapt `accelerate.state`: `PartialState().device` is the remote device if Accelerate would choose the CPU."""
    choose = module.PartialState.default_device.fget

    def default_device(state: Any) -> torch.device:
        device: torch.device = choose(state)
        return logical_device(0) if device == _CPU else device

    module.PartialState.default_device = property(default_device)


def adapt_modeling(module: Any) -> None:
    """Adapt `accelerate.utils.modeling`: `device_map="auto"` includes the remote device by its number, like a GPU."""
    measure_memory = module.get_max_memory

    @functools.wraps(measure_memory)
    def get_max_memory(max_memory: MemoryByDevice | None = None) -> MemoryByDevice:
        if max_memory is None:
            memory: MemoryByDevice = measure_memory()
            return memory if set(memory) != {"cpu"} else {0: _free_bytes(), **memory}
        for device, size in max_memory.items():  # in place, as transformers expects
            max_memory[device] = module.convert_file_size_to_int(size) if isinstance(size, str) else size
        ours = {device: size for device, size in sorted(max_memory.items(), key=str) if _is_ours(device)}
        return {**ours, **measure_memory({device: size for device, size in max_memory.items() if device not in ours})}

    rebind(measure_memory, get_max_memory, _LIBRARIES)


def _is_ours(device: int | str) -> bool:
    """Return True if `device` is a number, which Accelerate takes for a GPU, and this machine has no accelerator."""
    return isinstance(device, int) and is_the_only_accelerator()


def _free_bytes() -> int:
    """Return the free bytes on the remote device, or the largest integer if unknown."""
    measure = getattr(getattr(torch, DEVICE_NAME), "mem_get_info", None)
    return sys.maxsize if measure is None else int(measure(0)[0])
