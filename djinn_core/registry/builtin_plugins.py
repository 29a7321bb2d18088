"""The plugins that are part of Djinn. They are loaded like any other plugin: modules with marked hooks."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from types import MappingProxyType
from typing import Final

# By name of the plugin the kind of its hook and its module, in pipeline order. The name is that of the module.
_MODULES: Final = MappingProxyType({
    "device": ("interceptors", "djinn_client.builtins"),
    "costs": ("cost_models", "djinn_core.planning.builtins"),
    "placement": ("placement_policies", "djinn_core.planning.builtins"),
    "scheduling": ("schedulers", "djinn_core.planning.builtins"),
    "local": ("transports", "djinn_core.protocol"),
    "cpu": ("devices", "djinn_server.builtins"),
    "memory": ("memory_policies", "djinn_server.builtins"),
    "weights": ("weight_sources", "djinn_server.builtins"),
    "safetensors_files": ("weight_formats", "djinn_server.builtins"),
    "assignment": ("assignment_policies", "djinn_server.builtins"),
})  # fmt: skip


def builtin_plugins(kinds: Collection[str] | None = None) -> dict[str, str]:
    """Return modules of the built-in plugins of these kinds, or of all, by name in pipeline order. None is imported yet.

    The plugins of a package that is not installed are left out: a client may lack the server, and a server the client. A package
    that cannot be imported makes its plugins fail as those of strangers do.
    """
    wanted = {name: folder for name, (kind, folder) in _MODULES.items() if kinds is None or kind in kinds}
    return {
        name: f"{folder}.{name}"
        for name, folder in wanted.items()
        if importlib.util.find_spec(folder.partition(".")[0]) is not None
    }
