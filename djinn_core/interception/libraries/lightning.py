"""Lightning: an accelerator of our name for `Trainer` and `Fabric`, which `accelerator="auto"` finds.

Their connectors know what to do for the accelerators that they ship: for all others they would run on the CPU
(`_choose_strategy`) and autocast for CUDA (`_check_and_init_precision`).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from djinn_core.interception.libraries.choice import is_the_only_accelerator
from djinn_core.interception.tensors.lazy_tensor import DEVICE_NAME, logical_device

_MIXED = ("16-mixed", "bf16-mixed")


def adapt_accelerators(module: Any) -> None:
    """`lightning.pytorch.accelerators`, `lightning.fabric.accelerators`: `accelerator="remote_accelerator"`."""
    registry = getattr(module, "AcceleratorRegistry", None) or module.ACCELERATOR_REGISTRY
    registry.register(DEVICE_NAME, _accelerator(module.Accelerator), description="Djinn's remote accelerator")


def _accelerator(base: Any) -> type:
    class RemoteAccelerator(base):  # type: ignore[misc]
        """A device whose memory and compute are on a server."""

        def setup_device(self, device: torch.device) -> None:
            torch.get_device_module(device).set_device(device)

        def teardown(self) -> None:
            """Nothing: the session goes on."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            del device
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            """Indexes of devices, of a number, a list or a string of them."""
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
            """One: a process drives one device."""
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return DEVICE_NAME

    return RemoteAccelerator


def adapt_trainer(module: ModuleType) -> None:
    """`lightning.pytorch.trainer.connectors.accelerator_connector`: strategy and precision for our accelerator."""
    _adapt_connector(vars(module)["_AcceleratorConnector"], module, "_precision_flag")


def adapt_fabric(module: ModuleType) -> None:
    """`lightning.fabric.connector`: likewise."""
    _adapt_connector(vars(module)["_Connector"], module, "_precision_input")


def _adapt_connector(connector: Any, module: Any, precision: str) -> None:
    auto, strategy = connector._choose_auto_accelerator, connector._choose_strategy
    checked = connector._check_and_init_precision

    def choose_auto_accelerator() -> str:
        chosen: str = auto()
        return DEVICE_NAME if chosen == "cpu" and is_the_only_accelerator() else chosen

    @functools.wraps(strategy)
    def choose_strategy(self: Any) -> Any:
        if self.accelerator.name() != DEVICE_NAME or len(self._parallel_devices) != 1:
            return strategy(self)
        return module.SingleDeviceStrategy(device=self._parallel_devices[0])

    @functools.wraps(checked)
    def check_and_init_precision(self: Any) -> Any:
        wanted = getattr(self, precision)
        if self.accelerator.name() != DEVICE_NAME or wanted not in _MIXED:
            return checked(self)
        return module.MixedPrecision(wanted, DEVICE_NAME)

    connector._choose_auto_accelerator = staticmethod(choose_auto_accelerator)
    connector._choose_strategy = choose_strategy
    connector._check_and_init_precision = check_and_init_precision
