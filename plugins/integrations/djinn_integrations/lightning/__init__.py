"""Adapters for Lightning, whose packages have the names `lightning`, `pytorch_lightning` and `lightning_fabric`."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Integration, hookimpl
from djinn_integrations.lightning.accelerator import adapt_accelerators
from djinn_integrations.lightning.connectors import adapt_fabric, adapt_trainer

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the modules that define and choose accelerators."""
    trainers, fabrics = ("lightning.pytorch", "pytorch_lightning"), ("lightning.fabric", "lightning_fabric")
    return [
        *(
            Integration(f"{package} accelerators", f"{package}.accelerators", adapt_accelerators)
            for package in (*trainers, *fabrics)
        ),
        *(
            Integration(f"{package} trainer", f"{package}.trainer.connectors.accelerator_connector", adapt_trainer)
            for package in trainers
        ),
        *(Integration(f"{package} fabric", f"{package}.connector", adapt_fabric) for package in fabrics),
    ]
