"""The device `cuda`: NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Device, hookimpl
from djinn_cuda.device import CudaDevice

__all__ = ["CudaDevice", "djinn_api_version", "djinn_register_devices"]

djinn_api_version = "2.0"


@hookimpl
def djinn_register_devices() -> Iterable[Device]:
    """Return the device kind `cuda`."""
    return [CudaDevice()]
