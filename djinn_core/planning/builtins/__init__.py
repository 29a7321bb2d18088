"""The plugins that are part of Djinn. They are loaded like any other plugin: modules with marked hooks."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from types import MappingProxyType, ModuleType
from typing import Final

# By name of the plugin, which is that of its module, the kind of its hook.
_KINDS: Final = MappingProxyType({
    "device": "interception",
    "costs": "costs",
    "placement": "placement",
    "scheduling": "schedulers",
    "local": "transports",
    "cpu": "devices",
    "memory": "memory",
    "weights": "weights",
    "safetensors_files": "weight_formats",
    "assignment": "assignment",
})  # fmt: skip


def builtin_plugins(kinds: Collection[str] | None = None) -> dict[str, ModuleType]:
    """The built-in plugins by name, in pipeline order, or those with hooks of these kinds. They are imported now, not before."""
    names = [name for name, kind in _KINDS.items() if kinds is None or kind in kinds]
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}
