"""Selection of plugins by the settings."""

from __future__ import annotations

from typing import Any

import msgspec

from djinn_core.settings import PluginSetting, Settings


class Selection(msgspec.Struct, frozen=True):
    """The plugins that a process uses, as the settings select them.

    Attributes:
        plugins: names, importable module names, modules or objects, in addition to the built-in plugins. None: all
            installed plugins.
        disable: names of disabled plugins, which may be built in.
        strict: True if a broken plugin is an error instead of a warning.
        trace: True if each call of a hook is logged.
        plugin_settings: as in the settings.
    """

    plugins: tuple[Any, ...] | None = None
    disable: frozenset[str] = frozenset()
    strict: bool = False
    trace: bool = False
    plugin_settings: tuple[PluginSetting, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> Selection:
        """Return the selection by the settings `plugins`, `disable`, `strict`, `trace_plugins` and `plugin_settings`."""
        names = frozenset(settings.disable)
        return cls(settings.plugins, names, settings.strict, settings.trace_plugins, settings.plugin_settings)

    def sendable(self) -> Selection:
        """Return a copy whose setting values can be written as JSON."""
        return msgspec.structs.replace(self, plugin_settings=tuple(given.sendable() for given in self.plugin_settings))
