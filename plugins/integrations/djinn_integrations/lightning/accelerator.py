"""The accelerator `remote_accelerator` for `Trainer` and `Fabric`."""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.tensors.lazy_tensor import logical_device


def adapt_accelerators(module: Any) -> None:
    """Add `remote_accelerator` to `lightning.pytorch.accelerators` or `lightning.fabric.accelerators`."""
    registry = getattr(module, "AcceleratorRegistry", None) or module.ACCELERATOR_REGISTRY
    registry.register(DEVICE_NAME, _accelerator(module.Accelerator), description="Djinn's remote accelerator")


def _accelerator(base: Any) -> type:
    class RemoteAccelerator(base):  # type: ignore[misc]
        """A device whose memory and compute are on a server."""

        def setup_device(self, device: torch.device) -> None:
            torch.get_device_module(device).set_device(device)

        def teardown(self) -> None:
            """Do nothing, because the session continues."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            del device
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            """Return device indexes. `devices`: a number of devices, a list of indexes, or a string of either."""
            if isinstance(devices, str):
                devices = [int(part) for part in devices.split(",")] if "," in devices else int(devices)
            if isinstance(devices, int):
                return list(range(1 if devices == -1 else devices))
            return list(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [logical_device(index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            """Return 1, because all executors are one device."""
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return DEVICE_NAME

    return RemoteAccelerator
