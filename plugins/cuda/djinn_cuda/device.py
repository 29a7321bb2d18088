"""CUDA devices: selection of the visible GPU, and memory figures that take no memory on the GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from djinn.errors import StartupError
from djinn.hooks import Device, DeviceRuntime
from djinn.planning import DeviceCapabilities

log = logging.getLogger("djinn_cuda")


class CudaDevice(Device):
    """The GPUs of this machine, `cuda:0` and so on. On a ROCm build of PyTorch, the AMD GPUs."""

    name = "cuda"

    def select(self, index: int) -> int:
        """Hide all GPUs but `index` from this process, and return the new index of this GPU.

        CUDA must not have been called before, because it reads the environment variable at its first call.
        """
        variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
        visible = os.environ.get(variable)
        names = visible.split(",") if visible is not None else [str(number) for number in range(_driver_count())]
        if index >= len(names):
            return index  # `discover` shows the GPUs that there are
        os.environ[variable] = names[index].strip()
        return 0

    def describe(self, index: int) -> DeviceCapabilities:
        """Return the name from PyTorch, and the memory from NVML."""
        properties = torch.cuda.get_device_properties(index)
        total, free = _memory(index, str(getattr(properties, "uuid", "")))
        return DeviceCapabilities(f"cuda:{index}", "cuda", properties.name, memory=total, memory_free=free)

    def sensors(self, index: int) -> Mapping[str, float]:
        """Return utilization and temperature from NVML, or an empty mapping if NVML does not know the GPU."""
        return _sensors(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))

    def open(self, index: int) -> DeviceRuntime:
        """Open a GPU for this process.

        Raises:
            StartupError: there is no such GPU, or it does not work.
        """
        if self.count() == 0:
            raise StartupError(
                "there is no GPU that this PyTorch can use: check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that torch is a "
                f"CUDA build (this is {torch.__version__}), or serve with `--device cpu`"
            )
        return super().open(index)


def _driver_count() -> int:
    """Return the number of GPUs that the driver knows, or 0 if NVML does not work."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        log.info("cannot count GPUs with NVML, so this process sees all of them: %s", error)
        return 0


def _sensors(uuid: str) -> dict[str, float]:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            utilization = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            return {
                "utilization": utilization,
                "temperature": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
            }
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        log.debug("NVML has no sensors of this GPU: %s", error)
        return {}


def _memory(index: int, uuid: str) -> tuple[int, int]:
    """Return total and free bytes of GPU `index`, whose unique id is `uuid`.

    If NVML does not know the GPU (for example a slice of a GPU, or an embedded board), CUDA answers. CUDA then takes a
    few hundred megabytes on the GPU until this process ends.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            return int(memory.total), int(memory.free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        log.info("fell back from NVML to CUDA for the memory figures of cuda:%d: %s", index, error)
    free, total = torch.cuda.mem_get_info(index)
    return total, free
