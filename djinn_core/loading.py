"""Imports without garbage collection: each would look at all that PyTorch has made, up to 0.15 s."""

from __future__ import annotations

import importlib
from typing import Any

from djinn_core.interception.recording.gc_pause import collect_later
from djinn_core.role import is_client


def name_in(module: str, name: str) -> Any:
    """What a module of Djinn has under that name; imports it."""
    with collect_later:
        return getattr(importlib.import_module(module), name)


def attach() -> None:
    """Register the device, where this process is a client."""
    if is_client():
        with collect_later:
            importlib.import_module("djinn_core.runtime.attaching").attach()
            importlib.import_module("djinn_core.runtime.server_files").save_at_addresses()
