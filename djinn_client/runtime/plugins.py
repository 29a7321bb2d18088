"""Plugins of a client, and their integrations: changes to libraries that the user's program imports.

The entry-point group of an integration names a library, such as `djinn.integrations.transformers`. The import of that
library loads the plugin, so importing `djinn` imports no plugin. The setting `plugins` does not affect these plugins,
because libraries may be imported before the program configures Djinn. The setting `disable` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from types import ModuleType

from djinn_client.hookspecs.integrations import Integration
from djinn_client.interception.on_import import adapt_on_import
from djinn_client.runtime.context import ClientContext, context
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.logs import get_logger
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.discovery import PluginCandidate
from djinn_core.registry.kinds import CLIENT_KINDS
from djinn_core.registry.loading import PluginLoader
from djinn_core.registry.registry import Registry, open_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings, resolve

_log = get_logger("djinn.plugins")


def open_plugins(settings: Settings | None = None, kinds: Collection[str] = CLIENT_KINDS) -> Registry:
    """Return the plugins that `settings` select. The first use of a kind loads its plugins.

    `settings`: by default, the settings of the environment. `kinds`: the kinds of plugins that can be used.

    Raises:
        ConfigurationError: a setting is malformed.
        PluginError: a plugin that the settings name cannot be used.
    """
    selection = Selection.from_settings(resolve().settings if settings is None else settings)
    return open_registry(selection, builtins=builtin_plugins(), kinds=kinds)


def is_disabled(plugin: str) -> bool:
    """Return True if the settings in force disable a plugin.

    Integrations call this, because their changes to a library stay when the user disables the plugin later.
    """
    return context.settings is not None and plugin in context.settings.disable


def integrate_registered(context: ClientContext, registry: Registry) -> None:
    """Call the integrations of all plugins in use that were not called yet."""
    for integration in registry.integrations:
        row = registry.owners["integrations", integration.name]
        _integrate(context, integration, row.name, row.label)


def integrate_candidates(context: ClientContext, candidates: Iterable[PluginCandidate]) -> None:
    """Load plugins during the import of a library. The import continues if a plugin fails."""
    settings = _settings(context)
    for candidate in candidates:
        try:
            _integrate_candidate(context, candidate, settings)
        except DjinnError as error:
            _log.warning("a plugin cannot be used", plugin=candidate.name, error=str(error))


def _integrate_candidate(context: ClientContext, candidate: PluginCandidate, settings: Settings) -> None:
    loader = PluginLoader(Selection.from_settings(settings), {"integrations"}, libraries=True)
    loader.take(candidate, requested=True)
    for integration in loader.load("integrations"):
        _integrate(context, integration, candidate.name, candidate.label)
    loader.report_failures()


def _integrate(context: ClientContext, integration: Integration, plugin: str, label: str) -> None:
    """Call an integration with its module, once per process."""
    # `setdefault` is atomic. This matters because any thread may import libraries.
    if context.integrated.setdefault(integration.name, integration) is integration:
        adapt_on_import({integration.module: partial(_adapt, context, integration, plugin)}, by=label)


def _adapt(context: ClientContext, integration: Integration, plugin: str, module: ModuleType) -> None:
    """Call an integration, unless the settings disable its plugin."""
    if plugin not in _settings(context).disable:
        integration.adapt(module)


def _settings(context: ClientContext) -> Settings:
    """Return the settings in force, or default settings if the configured settings are malformed.

    The first use of the device raises the error of malformed settings.
    """
    try:
        return context.settings or resolve(context.overrides).settings
    except ConfigurationError:
        return Settings()
