"""`torch.cuda.get_device_properties`: what is known of the device behind the session."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from djinn_core.interception.current_device import existing_index
from djinn_core.interception.lazy_tensor import DEVICE_NAME
from djinn_core.runtime import client


@attrs.frozen
class DeviceProperties:
    """What programs ask of a GPU; sizes in bytes.

    The compute capability is that of the first GPUs with bfloat16 and TF32: a server does not say its own, and programs
    ask to know whether they may use the two. Numbers that nobody told are those of one small multiprocessor.
    """

    name: str
    total_memory: int
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 0
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""  # noqa: N815 - AMD's name
    uuid: str = ""


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The properties of a device; connects at first use.

    Raises:
        RuntimeError: there is no such device.
    """
    if device is None or isinstance(device, int):
        device = torch.device(DEVICE_NAME, device) if device is not None else torch.device(DEVICE_NAME)
    existing_index(torch.device(device))
    client.init()
    info = client.device()
    assert info is not None
    return DeviceProperties(name=info.name or info.id, total_memory=info.memory)
