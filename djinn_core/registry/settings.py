"""Settings of plugins: declared as an attrs class, set in the same places as the core's settings, and shown with their origin."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs
import msgspec

from djinn_core.errors import ConfigurationError, PluginError
from djinn_core.registry.report import log
from djinn_core.settings import CONVERTERS, HIDDEN, PLUGIN_PREFIX, PluginSetting, SettingRow, one_of

ATTRIBUTE: Final = "djinn_settings"  # attribute of a plugin module, next to `djinn_api_version`


class DeclaredSettings(msgspec.Struct, frozen=True):
    """A plugin's settings: an instance of its attrs class, and a row per setting for `djinn doctor`."""

    values: Any = None
    rows: tuple[SettingRow, ...] = ()
    variables: frozenset[str] = frozenset()


def read_settings(plugin: object, name: str, plugin_settings: Sequence[PluginSetting]) -> DeclaredSettings:
    """Return the settings of the plugin `name` from the values in `plugin_settings`. Missing values are defaults.

    Raises:
        ConfigurationError: the plugin has no setting of a given name, or a value is malformed; the message names its
            origin.
        PluginError: the settings class of the plugin cannot be used.
    """
    declared = getattr(plugin, ATTRIBUTE, None)
    own = [setting for setting in plugin_settings if setting.plugin == name]
    if declared is None:
        if own:
            raise ConfigurationError(
                f"The plugin {name!r} has no settings: remove `{own[0].name}` from {own[0].origin}."
            )
        return DeclaredSettings()
    fields = _fields(declared)
    variables = {variable(name, field): field for field in fields}
    values_by_name: dict[str, PluginSetting] = {}
    for setting in plugin_settings:
        if setting.plugin == name:
            _check_name(name, setting, fields)
            values_by_name[setting.name] = setting
        elif not setting.plugin and setting.name in variables:
            values_by_name[variables[setting.name]] = setting
    values = _construct(declared, name, fields, values_by_name)
    rows = tuple(_row(name, field, values, values_by_name) for field in attrs.fields(declared))
    return DeclaredSettings(values, rows, frozenset(variables))


def variable(plugin: str, setting: str) -> str:
    """Return the suffix after `DJINN_PLUGIN_` in the environment variable of a plugin's setting."""
    return re.sub(r"[^A-Z0-9]", "_", f"{plugin}_{setting}".upper())


def warn_of_unknown_plugins(plugin_settings: Iterable[PluginSetting], plugins: Collection[str]) -> None:
    """Warn of settings for plugins that are neither built in nor installed."""
    for setting in plugin_settings:
        if setting.plugin and setting.plugin not in plugins:
            close = difflib.get_close_matches(setting.plugin, plugins, 1)
            _warn(f"[plugins.{setting.plugin}] ({setting.origin})", f"[plugins.{close[0]}]" if close else "")
        elif not setting.plugin and not _owner(setting.name, plugins):
            prefixes = {variable(plugin, ""): plugin for plugin in plugins}
            close = difflib.get_close_matches(setting.name, prefixes, 1, cutoff=0.3)
            _warn(PLUGIN_PREFIX + setting.name, f"one that begins with {PLUGIN_PREFIX}{close[0]}" if close else "")


def warn_of_unknown_variables(
    plugin_settings: Iterable[PluginSetting], plugin: str, variables: Collection[str], plugins: Collection[str]
) -> None:
    """Warn of environment variables that have a plugin's prefix but match no setting."""
    for setting in plugin_settings:
        if not setting.plugin and setting.name not in variables and _owner(setting.name, plugins) == plugin:
            close = difflib.get_close_matches(setting.name, variables, 1)
            _warn(PLUGIN_PREFIX + setting.name, PLUGIN_PREFIX + close[0] if close else "")


def is_given_to(setting: PluginSetting, plugin: str, plugins: Collection[str]) -> bool:
    """Return True if a setting belongs to a plugin.

    `plugins` has all plugin names, which may be prefixes of each other.
    """
    return setting.plugin == plugin or (not setting.plugin and _owner(setting.name, plugins) == plugin)


def _owner(name: str, plugins: Iterable[str]) -> str:
    """Return the plugin of an environment variable, by the longest matching name; empty if none matches."""
    return max((plugin for plugin in plugins if name.startswith(variable(plugin, ""))), key=len, default="")


def _warn(setting: str, meant: str) -> None:
    log().warning("unknown setting of a plugin; it has no effect", setting=setting, meant=meant or "no known setting")


def _fields(declared: Any) -> Mapping[str, Any]:
    """Return the converters by setting. A converter is None if the attrs field has its own."""
    if not isinstance(declared, type) or not attrs.has(declared):
        raise PluginError(
            f"its `{ATTRIBUTE}` is {declared!r}, but must be an attrs class: decorate it with @attrs.frozen"
        )
    hints = get_type_hints(declared)
    fields = {}
    for field in attrs.fields(declared):
        if field.default is attrs.NOTHING:
            raise PluginError(f"its setting `{field.name}` has no default: every setting needs one")
        fields[field.name] = None if field.converter is not None else _converter(field.name, hints.get(field.name))
    return fields


def _converter(name: str, hint: Any) -> Any:
    if hint in CONVERTERS:
        return CONVERTERS[hint]
    if get_origin(hint) is Literal:
        return partial(one_of, get_args(hint))
    if get_origin(hint) in {Union, types.UnionType}:
        types_without_none = [part for part in get_args(hint) if part is not type(None)]
        if len(types_without_none) == 1 and len(get_args(hint)) == 2:
            convert = _converter(name, types_without_none[0])
            return lambda value: None if value is None or value == "" else convert(value)
    raise PluginError(
        f"its setting `{name}` has the type {hint}: a setting is a bool, int, float, str, Path, tuple[str, ...], a Literal of "
        "text, one of these or None, or has a converter of its own"
    )


def _check_name(plugin: str, setting: PluginSetting, fields: Mapping[str, Any]) -> None:
    if setting.name in fields:
        return
    close = difflib.get_close_matches(setting.name, fields, 1)
    hint = f"did you mean `{close[0]}`?" if close else f"it has {', '.join(f'`{name}`' for name in fields)}."
    raise ConfigurationError(f"The plugin {plugin!r} has no setting `{setting.name}` ({setting.origin}): {hint}")


def _construct(
    declared: Any, plugin: str, fields: Mapping[str, Any], values_by_name: Mapping[str, PluginSetting]
) -> Any:
    values: dict[str, Any] = {}
    arguments = {field.name: field.alias for field in attrs.fields(declared)}
    for name, setting in values_by_name.items():
        try:
            convert = fields[name]
            values[arguments[name]] = setting.value if convert is None else convert(setting.value)
            declared(**{arguments[name]: values[arguments[name]]})  # runs the validators of one setting at a time
        except (ValueError, TypeError) as error:
            value_text = HIDDEN if not attrs.fields_dict(declared)[name].repr else repr(setting.value)
            raise ConfigurationError(
                f"The setting `plugins.{plugin}.{name}` {_error_text(error)}, and not {value_text} ({setting.origin})."
            ) from None
    try:
        return declared(**values)
    except (ValueError, TypeError) as error:
        origins = ", ".join(sorted({setting.origin for setting in values_by_name.values()})) or "all of them defaults"
        raise ConfigurationError(
            f"The settings of the plugin {plugin!r} contradict each other ({origins}): {error}."
        ) from None


def _error_text(error: Exception) -> str:
    """Return the message of a converter or a validator as the end of a sentence."""
    text = str(error.args[0] if error.args else error)
    return text if text.startswith("must") else f"is refused: {text}"


def _row(plugin: str, field: Any, values: Any, values_by_name: Mapping[str, PluginSetting]) -> SettingRow:
    value = getattr(values, field.name)
    text = HIDDEN if not field.repr and value else str(value) if isinstance(value, (str, Path)) else repr(value)
    origin = values_by_name[field.name].origin if field.name in values_by_name else "default"
    return SettingRow(f"plugins.{plugin}.{field.name}", text, origin)
