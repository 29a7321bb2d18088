"""The plugins that are part of Djinn: entry points that no distribution declares."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Final

# For each plugin name its kind and its module's package, in pipeline order. The module has the same name.
_MODULES: Final = MappingProxyType({
    "native": ("interception", "djinn_client.builtins"),
    "costs": ("cost_models", "djinn_core.planning.builtins"),
    "placement": ("placement_policies", "djinn_core.planning.builtins"),
    "scheduling": ("schedulers", "djinn_core.planning.builtins"),
    "local": ("transports", "djinn_core.protocol"),
    "cpu": ("devices", "djinn_server.builtins"),
    "weights": ("weight_sources", "djinn_server.builtins"),
    "safetensors_files": ("weight_formats", "djinn_server.builtins"),
})  # fmt: skip


def builtin_plugins() -> dict[str, EntryPoint]:
    """Return entry points of the built-in plugins by name, in pipeline order. No plugin is imported yet.

    The plugins of a package that is not installed are missing: a client may lack the server, and a server the client.
    If a package cannot be imported, its plugins fail like external plugins.
    """
    return {
        name: EntryPoint(name, f"{folder}.{name}", f"djinn.{kind}")
        for name, (kind, folder) in _MODULES.items()
        if importlib.util.find_spec(folder.partition(".")[0]) is not None
    }
