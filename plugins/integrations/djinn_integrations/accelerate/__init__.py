"""Adapters for Accelerate: it chooses the remote device, and its checkpoints keep the device's random state."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Integration, hookimpl
from djinn_integrations.accelerate.checkpoints import adapt_checkpointing
from djinn_integrations.accelerate.device import adapt_modeling, adapt_state

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the modules of Accelerate that choose devices, query their memory, or save checkpoints."""
    return [
        Integration("accelerate checkpoints", "accelerate.checkpointing", adapt_checkpointing),
        Integration("accelerate device", "accelerate.state", adapt_state),
        Integration("accelerate device map", "accelerate.utils.modeling", adapt_modeling),
    ]
