"""The plugins that are part of Djinn. They are loaded like any other plugin: modules with marked hooks."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

# By name of the plugin the module that it is.
_MODULES: Final = {
    name: f"djinn_core.builtins.{name}"
    for name in ("device", "costs", "placement", "scheduling", "local", "cpu", "memory", "weights", "assignment")
}


def builtin_plugins() -> dict[str, ModuleType]:
    """The built-in plugins by name, in pipeline order. They are imported now, not before."""
    return {name: importlib.import_module(module) for name, module in _MODULES.items()}
