"""Loading of a client's plugins: at first those that are asked when a session begins, and all others when a program is planned."""

from __future__ import annotations

from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import CLIENT_KINDS, OPENING_KINDS
from djinn_core.registry.registry import Registry, Selection, load_later, load_opening, load_registry
from djinn_core.settings import Settings, resolve


def load_plugins(settings: Settings) -> Registry:
    """The plugins that the settings select.

    Raises:
        PluginError: one that they name cannot be used.
    """
    return load_registry(Selection.from_settings(settings), builtins=builtin_plugins(CLIENT_KINDS), kinds=CLIENT_KINDS)


def load_opening_plugins(settings: Settings) -> Registry:
    """The plugins that are asked when a session begins, or all where the settings say something about plugins, or name an engine.

    Raises:
        PluginError: one that they name cannot be used.
    """
    selection = Selection.from_settings(settings)
    if selection != Selection() or settings.engine != Settings().engine:
        return load_plugins(settings)
    return load_opening(selection, builtins=builtin_plugins(OPENING_KINDS), first=OPENING_KINDS, kinds=CLIENT_KINDS)


def all_plugins(settings: Settings, opening: Registry) -> Registry:
    """The plugins that the settings select, of which `opening` are in use."""
    if not opening.later:
        return opening
    return load_later(Selection.from_settings(settings), opening, builtins=builtin_plugins(CLIENT_KINDS))


def load_selected(*kinds: str) -> Registry:
    """The plugins that the settings select, with hooks of these kinds, or of all kinds that clients use.

    Raises:
        ConfigurationError: a setting is wrong.
        PluginError: a plugin that they name cannot be used.
    """
    selection = Selection.from_settings(resolve().settings)
    return load_registry(selection, builtins=builtin_plugins(kinds or CLIENT_KINDS), kinds=kinds or CLIENT_KINDS)
