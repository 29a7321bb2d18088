"""Adapters for safetensors: files are read onto the remote device, and all tensors to save are fetched in one round trip."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Integration, hookimpl
from djinn_integrations.safetensors.files import adapt_reading, adapt_saving

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the modules that read and write files."""
    return [
        Integration("safetensors reading", "safetensors", adapt_reading),
        Integration("safetensors saving", "safetensors.torch", adapt_saving),
    ]
