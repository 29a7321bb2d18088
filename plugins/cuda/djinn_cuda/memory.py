"""Memory size of a GPU, queried without allocating on it."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("djinn_cuda")


def device_memory(index: int, uuid: str) -> tuple[int, int]:
    """Total and free bytes of GPU `index`, whose unique id is `uuid`.

    Asks NVML; where it does not know the GPU (a slice of one, an embedded board) CUDA is asked instead, which takes a few
    hundred megabytes on that GPU for as long as this process lives.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            return int(found.total), int(found.free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        log.info("fell back from NVML to CUDA for the memory figures of cuda:%d: %s", index, error)
    free, total = torch.cuda.mem_get_info(index)
    return total, free
