"""Import hooks for plugins that adapt a library to the device: patch its modules when they are imported."""

from __future__ import annotations

from djinn_core.interception.libraries.on_import import adapt_on_import, rebind
from djinn_core.logs import get_logger
from djinn_core.torch_objects import forward_hooks

__all__ = ["adapt_on_import", "forward_hooks", "get_logger", "rebind"]
