"""`torch.cuda.get_device_properties`: what is known of the device behind the session."""

from __future__ import annotations

from typing import Any

import attrs

from djinn_client.interception.device import properties


@attrs.frozen
class CudaProperties:
    """GPU properties that programs ask for; sizes in bytes. Numbers that an executor does not tell are those of an A100.

    A CPU has no compute capability; programs get the first that has bfloat16 and TF32, since they ask in order to know
    whether they may use the two.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
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


_CAPABILITY_OF_CPUS = (8, 0)


def get_device_properties(device: Any = None) -> CudaProperties:
    """The properties of a device; connects at first use.

    Raises:
        RuntimeError: there is no such device.
    """
    found = properties.get_device_properties(device)
    major, minor = (found.major, found.minor) if found.major else _CAPABILITY_OF_CPUS
    return CudaProperties(found.name, found.total_memory, max(1, found.multi_processor_count), major, minor)
