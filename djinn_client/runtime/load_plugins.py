"""The plugins of a client, of which each kind is loaded when it is first asked for."""

from __future__ import annotations

from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.registry import Registry, open_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, resolve


def open_plugins(settings: Settings) -> Registry:
    """The plugins that the settings select.

    Raises:
        ConfigurationError: a setting of a plugin is malformed.
        PluginError: one that they name cannot be used.
    """
    return open_registry(Selection.from_settings(settings), builtins=builtin_plugins(), kinds=CLIENT_KINDS)


def load_selected(*kinds: str) -> Registry:
    """The plugins that the settings select, with hooks of these kinds, or of all kinds that clients use.

    Raises:
        ConfigurationError: a setting is wrong.
        PluginError: a plugin that they name cannot be used.
    """
    selection = Selection.from_settings(resolve().settings)
    return open_registry(selection, builtins=builtin_plugins(), kinds=kinds or CLIENT_KINDS)
