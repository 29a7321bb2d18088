"""Strategy and precision of `Trainer` and `Fabric` for the remote device's accelerator.

`accelerator="auto"` and `"gpu"` find this accelerator. Without the adapter, Lightning's connectors would select the CPU
strategy (`_choose_strategy`) and CUDA autocast (`_check_and_init_precision`).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_integrations import is_the_only_accelerator

_MIXED = ("16-mixed", "bf16-mixed")


def adapt_trainer(module: ModuleType) -> None:
    """Let `lightning.pytorch.trainer.connectors.accelerator_connector` support the remote device."""
    _adapt_connector(vars(module)["_AcceleratorConnector"], module, "_precision_flag")


def adapt_fabric(module: ModuleType) -> None:
    """Let `lightning.fabric.connector` support the remote device."""
    _adapt_connector(vars(module)["_Connector"], module, "_precision_input")


def _adapt_connector(connector: Any, module: Any, precision: str) -> None:
    auto, strategy = connector._choose_auto_accelerator, connector._choose_strategy
    gpu = connector._choose_gpu_accelerator_backend
    check_precision = connector._check_and_init_precision

    def choose_auto_accelerator() -> str:
        accelerator: str = auto()
        return DEVICE_NAME if accelerator == "cpu" and is_the_only_accelerator() else accelerator

    def choose_gpu_accelerator_backend() -> str:
        return DEVICE_NAME if is_the_only_accelerator() else gpu()

    @functools.wraps(strategy)
    def choose_strategy(self: Any) -> Any:
        if self.accelerator.name() != DEVICE_NAME or len(self._parallel_devices) != 1:
            return strategy(self)
        return module.SingleDeviceStrategy(device=self._parallel_devices[0])

    @functools.wraps(check_precision)
    def check_and_init_precision(self: Any) -> Any:
        attribute = getattr(self, precision)
        if self.accelerator.name() != DEVICE_NAME or attribute not in _MIXED:
            return check_precision(self)
        return module.MixedPrecision(attribute, DEVICE_NAME)

    connector._choose_auto_accelerator = staticmethod(choose_auto_accelerator)
    connector._choose_gpu_accelerator_backend = staticmethod(choose_gpu_accelerator_backend)
    connector._choose_strategy = choose_strategy
    connector._check_and_init_precision = check_and_init_precision
