"""Settings with the origin of each value.

Sources in order of precedence: arguments of `djinn.configure` or command-line flags, environment variables
(`DJINN_<NAME>`), a TOML file, defaults. Resolving has no side effects.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import attrs
import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.system.directories import configuration_directory
from djinn_core.system.files import mode_of, user_id

T = TypeVar("T")
PREFIX = "DJINN_"
PLUGIN_PREFIX = "DJINN_PLUGIN_"
FILE_VARIABLE = "DJINN_CONFIG"
HIDDEN = "(set, not shown)"
DEFAULT_SCHEDULER = "sequential"
PARALLEL_CONNECTIONS_LIMIT = 16  # per session; executors reject more
_MAX_SECONDS = 1_000_000.0  # selectors raise OverflowError for more than 24 days

# Variables of other modules, which are not settings.
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "DJINN_LOG_FORMAT", "DJINN_HTTP_HOSTS"})

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*((?:[kmgt]i?)?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS = {f"{p}{i}{b}": (1024 if i else 1000) ** n for p, n in _POWERS.items() for i in ("", "i") for b in ("", "b")}


def _names(value: object) -> tuple[str, ...]:
    """Return names as a tuple. A string is split at commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ValueError("must be a list of names")


def _pairs(value: object, split: Callable[[str, str], tuple[str, str, str]] = str.rpartition) -> list[tuple[Any, Any]]:
    """Return (name, value) pairs from a table, a list of pairs, or a list of texts that `split` divides."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(pair, tuple) for pair in value):
        return list(value)
    return [(name, setting) for name, _, setting in (split(part, "=") for part in _names(value))]


def _pins(value: object) -> tuple[tuple[str, str], ...]:
    """Return pairs of a pattern and a device."""
    pairs = tuple((str(pattern).strip(), str(device).strip()) for pattern, device in _pairs(value, str.partition))
    if not all(pattern and device for pattern, device in pairs):
        raise ValueError("must be a list of pattern=device, such as 'vision*=1'")
    return pairs


def _size(value: object) -> int:
    """Return bytes, from a number or from a text such as `2 GiB`."""
    match = _SIZE.fullmatch(str(value).strip())
    size = float(match[1]) * _UNITS[match[2].lower()] if match is not None and not isinstance(value, bool) else 0.0
    if size < 1:
        raise ValueError("must be a size such as '2 GiB', or sizes by device such as '0=2 GiB, 1=500 MiB'")
    return int(size)


def _limits(value: object) -> tuple[tuple[str, int], ...]:
    """Return pairs of a device and bytes. An empty device means all devices."""
    if value is None or value == "":
        return ()
    pairs = [("", value)] if isinstance(value, int | float) else _pairs(value)
    return tuple((str(device).strip(), _size(size)) for device, size in pairs)


def _resources(value: object) -> tuple[tuple[str, float], ...]:
    """Return pairs of a resource and an amount."""
    try:
        amounts = tuple((str(name).strip(), _gib(amount)) for name, amount in _pairs(value or ()))
    except ValueError:
        amounts = (("", 0.0),)
    if not all(name for name, _ in amounts):
        raise ValueError("must be amounts above 0 by resource, such as 'GPU=1,CPU=2'")
    return amounts


def _or_none(value: object) -> object:
    """Return the object unchanged; None for an empty string."""
    return None if value == "" else value


def _json_table(value: object) -> Mapping[str, Any]:
    """Return a table, parsed from JSON if it is a string."""
    if not value:
        return {}
    try:
        table = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        table = None
    if not isinstance(table, Mapping):
        raise ValueError("must be a table, or JSON of one")  # noqa: TRY004 - see _text
    return dict(table)


@attrs.frozen
class PluginSetting:
    """A value of a plugin's setting before conversion.

    In an environment variable, the names of plugin and setting cannot be separated yet. Then `plugin` is empty, and `name` is the
    part after `DJINN_PLUGIN_`.
    """

    plugin: str
    name: str
    value: Any = attrs.field(repr=False)  # may be a secret
    origin: str

    def sendable(self) -> PluginSetting:
        """Return a copy whose value JSON can represent: paths and other objects become text, parsed like a variable."""
        value = self.value
        plain = isinstance(value, (bool, int, float, str, NoneType)) or (
            isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
        )
        return self if plain else attrs.evolve(self, value=str(value))


def _plugin_settings(value: object) -> tuple[PluginSetting, ...]:
    """Return settings from tables by plugin, such as `{"my_plugin": {"its_setting": 32}}`."""
    if isinstance(value, tuple) and all(isinstance(part, PluginSetting) for part in value):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(table, Mapping) for table in value.values()):
        raise ValueError("must be a table of settings by plugin, such as {'my_plugin': {'its_setting': 32}}")
    return tuple(
        PluginSetting(str(plugin), str(name), values, "argument")
        for plugin, table in value.items()
        for name, values in table.items()
    )


def _plugins(value: object) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _names(value)
    if isinstance(value, Sequence):
        return tuple(value)
    raise ValueError("must be a list of names, modules or objects")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError("must be 1 or 0, true or false")
    return text in _TRUE


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - one type for all refusals
    return value


def _fingerprints(value: object) -> tuple[str, ...]:
    """Return normalized fingerprints. The form `SHA256:AB:CD:...` of other tools is accepted."""
    fingerprints = tuple("sha256:" + name.lower().removeprefix("sha256:").replace(":", "") for name in _names(value))
    if not all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in fingerprints):
        raise ValueError("must be a list of sha256: and 64 hexadecimal digits, as `djinn serve` prints them")
    return fingerprints


def _as_path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("must be a path")  # noqa: TRY004 - see _text
    return Path(value).expanduser()


def _checked(convert: Callable[[str], T], accepts: Callable[[T], bool], must: str, value: object) -> T:
    """Return a number. Raise `ValueError(must)` if `value` is not a number, or is not accepted."""
    try:
        number = None if isinstance(value, bool) else convert(str(value))
    except ValueError:
        number = None
    if number is None or not accepts(number):
        raise ValueError(must)
    return number


def _number(value: object) -> float:
    return _checked(float, lambda n: n == n, "must be a number", value)  # noqa: PLR0124 - NaN alone differs from itself


def _integer(value: object) -> int:
    return _checked(int, lambda _: True, "must be a whole number", value)


def _count(value: object) -> int:
    return _checked(int, lambda n: n >= 1, "must be a whole number, 1 or more", value)


def _gib(value: object) -> float:
    return _checked(float, lambda n: 0.0 < n < float("inf"), "must be a number of GiB above 0", value)


def _seconds(value: object) -> float:
    must = f"must be a number of seconds above 0, at most {_MAX_SECONDS:,.0f}"
    return _checked(float, lambda n: 0.0 < n <= _MAX_SECONDS, must, value)


def _optional(convert: Callable[[object], T], value: object) -> T | None:
    """Return the converted value, or None if the value is None or an empty string."""
    return None if value is None or value == "" else convert(value)


def _secret(value: object) -> str | None:
    return _optional(_text, value)


def _path(value: object) -> Path | None:
    return _optional(_as_path, value)


def _threads(value: object) -> int | None:
    return _optional(_count, value)


def _memory(value: object) -> float | None:
    return _optional(_gib, value)


def _zero_or(convert: Callable[[object], T], value: object) -> T | int:
    """Return the converted value; 0 for 0, None and an empty string."""
    return 0 if value in (None, "", 0, "0") and not isinstance(value, bool) else convert(value)


def _target(value: object) -> float:
    return float(_zero_or(_seconds, value))


def _connections(value: object) -> int:
    number = _zero_or(_count, value)
    if number > PARALLEL_CONNECTIONS_LIMIT:
        raise ValueError(f"must be {PARALLEL_CONNECTIONS_LIMIT} at most")
    return number


def one_of(choices: tuple[Any, ...], value: object) -> Any:
    """Return `value` if it is one of the choices.

    Raises:
        ValueError: it is not one of the choices.
    """
    if value not in choices:
        raise ValueError(f"must be {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
    return value


def _weights_from(value: object) -> str:
    return str(one_of(("auto", "server", "client"), value))


def _executor(value: object) -> str:
    return str(one_of(("process", "inline"), value))


def _at_import(value: object) -> str:
    if value == "auto":
        return "auto"
    try:
        return "yes" if _flag(value) else "no"
    except ValueError:
        raise ValueError("must be 'auto', 1 or 0, true or false") from None


@attrs.frozen
class Settings:
    """All settings. Converters raise `ValueError` with the predicate of a sentence, such as `must be 1 or 0`.

    Attributes:
        plugins: names, modules or objects of the plugins to use, in addition to the built-in plugins. Default: all
            installed plugins.
        disable: names of plugins to disable.
        strict: True if a plugin that fails to load is an error.
        trace_plugins: True to log each call of a plugin hook.
        plugin_settings: settings of plugins, by plugin and name. Later settings win.
        servers: URLs or log-ins of servers, which form one pool. Without servers and connection file, a local executor
            runs programs.
        token: access token for the servers. It is never shown.
        connection_file: file with `urls` and `token`, as `djinn serve` writes it.
        tls_authority: PEM file with the authorities that may sign server certificates. Default: the machine's
            authorities.
        tls_fingerprints: accepted server certificates, as `sha256:...`. Authorities are not checked then.
        tls_certificate, tls_key: PEM files with the client's certificate and key.
        spread: True if a session over several servers begins on the least loaded server, not the first.
        standby: URLs or connection files of servers that take over a lost session, in order. `engine`: another executor
            of the same engine.
        standby_seconds: seconds without a reply after which a standby server takes over.
        standby_gib: size limit of the client's log for standby servers.
        engine: name of the engine that starts executors. `local` starts processes on this machine.
        engine_address: address of the engine, such as the address of a cluster. By default the engine finds it.
        resources: resources that each executor reserves at the engine, such as `GPU=1,CPU=4`.
        runtime_env: environment of executors in the engine's own form, such as packages and variables. It is never
            shown.
        placement_group: reservation of the engine for the executors, as its object or its name.
        executors: number of executors to start if no server is named.
        executor: `process`, or `inline` to run the executor in this process for debugging.
        device: kind or id of the requested device, such as `cuda:0`. Default: all devices of a server.
        server_devices: devices of each server to use, by number, id or kind. Default: all that `device` selects.
        threads: PyTorch threads of a local executor. By default PyTorch decides.
        recover: True to replace a dead executor of this program by a new executor that recovers the session.
        memory_gib: memory limit of a local executor. Default: none.
        placement_policy: name of the placement policy. Default: the preferred policy for the devices.
        memory_limits: bytes that plans may place on each device, by id or number, or on all.
        calibrate: True to measure uncalibrated devices of a pool in the background.
        latency_target: seconds in which a program should complete, for the scheduler `dynamic`. 0 for as soon as
            possible.
        pins: devices of modules by patterns of their paths, for the policy `pinned`.
        scheduler: name of the scheduler.
        router: name of the router of sessions with several executors. Default: the preferred router.
        interception: name of the interception that records ops. It is read when `djinn` is imported.
        compilers: names of compilers that executors may use.
        operators: custom ops that local executors run: operator libraries, or `module:NAME` for Python ops of a
            module.
        assignment: name of the policy by which `djinn serve` assigns sessions to executors.
        assignment_hint: hint for this policy, such as the name of a model.
        authenticators: names of the authenticators that `djinn serve` asks after its own tokens.
        weights_from: reader of pretrained weights: `server`, `client`, or `auto`: the server if it has them.
        exact: True to exclude optimizations that change rounding.
        checkpoint_instructions: number of instructions after which a program is sent without a sync point.
        client_fallback: True to compute ops that the executor lacks on this machine.
        start_at_import: whether `import djinn` starts local executors: `yes`, `no`, or `auto`: if the last run of the
            same script used them.
        prepared_seconds: seconds without executors after which the prepared process, from which executors are forked,
            ends. 0 for no prepared process. Needs `djinn-launchers`.
        connect_timeout: seconds to wait for a server's reply.
        start_timeout: seconds to wait for the start of an executor.
        wait_timeout: maximum seconds of one wait for results. 0 for no limit.
        parallel_connections: number of connections for large tensors. 0 for four to another machine, and one on this
            machine.
        progress: True to show a progress bar for long uploads in a terminal.
        debug: parts whose debug messages are shown, such as `runtime,server`, or `all`.
    """

    plugins: tuple[Any, ...] | None = attrs.field(default=None, converter=_plugins)
    disable: tuple[str, ...] = attrs.field(default=(), converter=_names)
    strict: bool = attrs.field(default=False, converter=_flag)
    trace_plugins: bool = attrs.field(default=False, converter=_flag)
    plugin_settings: tuple[PluginSetting, ...] = attrs.field(default=(), converter=_plugin_settings)
    servers: tuple[str, ...] = attrs.field(default=(), converter=_names)
    token: str | None = attrs.field(default=None, converter=_secret, repr=False)
    connection_file: Path | None = attrs.field(default=None, converter=_path)
    tls_authority: Path | None = attrs.field(default=None, converter=_path)
    tls_fingerprints: tuple[str, ...] = attrs.field(default=(), converter=_fingerprints)
    tls_certificate: Path | None = attrs.field(default=None, converter=_path)
    tls_key: Path | None = attrs.field(default=None, converter=_path)
    spread: bool = attrs.field(default=True, converter=_flag)
    standby: tuple[str, ...] = attrs.field(default=(), converter=_names)
    standby_seconds: float = attrs.field(default=20.0, converter=_seconds)
    standby_gib: float = attrs.field(default=8.0, converter=_gib)
    engine: str = attrs.field(default="local", converter=_text)
    engine_address: str = attrs.field(default="", converter=_text)
    resources: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_resources)
    runtime_env: Mapping[str, Any] = attrs.field(factory=dict, converter=_json_table, repr=False)
    placement_group: Any = attrs.field(default=None, converter=_or_none)
    executors: int = attrs.field(default=1, converter=_count)
    executor: str = attrs.field(default="process", converter=_executor)
    device: str = attrs.field(default="", converter=_text)
    server_devices: tuple[str, ...] = attrs.field(default=(), converter=_names)
    threads: int | None = attrs.field(default=None, converter=_threads)
    recover: bool = attrs.field(default=True, converter=_flag)
    memory_gib: float | None = attrs.field(default=None, converter=_memory)
    placement_policy: str = attrs.field(default="", converter=_text)
    memory_limits: tuple[tuple[str, int], ...] = attrs.field(default=(), converter=_limits)
    calibrate: bool = attrs.field(default=True, converter=_flag)
    latency_target: float = attrs.field(default=0.0, converter=_target)
    pins: tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_pins)
    scheduler: str = attrs.field(default=DEFAULT_SCHEDULER, converter=_text)
    router: str = attrs.field(default="", converter=_text)
    interception: str = attrs.field(default="native", converter=_text)
    compilers: tuple[str, ...] = attrs.field(default=(), converter=_names)
    operators: tuple[str, ...] = attrs.field(default=(), converter=_names)
    assignment: str = attrs.field(default="least_loaded", converter=_text)
    assignment_hint: str = attrs.field(default="", converter=_text)
    authenticators: tuple[str, ...] = attrs.field(default=(), converter=_names)
    weights_from: str = attrs.field(default="auto", converter=_weights_from)
    exact: bool = attrs.field(default=True, converter=_flag)
    checkpoint_instructions: int = attrs.field(default=4096, converter=_count)
    client_fallback: bool = attrs.field(default=False, converter=_flag)
    start_at_import: str = attrs.field(default="auto", converter=_at_import)
    prepared_seconds: float = attrs.field(default=0.0, converter=_target)
    connect_timeout: float = attrs.field(default=30.0, converter=_seconds)
    start_timeout: float = attrs.field(default=60.0, converter=_seconds)
    wait_timeout: float = attrs.field(default=0.0, converter=_target)
    parallel_connections: int = attrs.field(default=0, converter=_connections)
    progress: bool = attrs.field(default=True, converter=_flag)
    debug: str = attrs.field(default="", converter=_text)


# Parsers by type, for arguments, variables and files.
CONVERTERS: Mapping[object, Callable[[object], Any]] = {
    bool: _flag,
    float: _number,
    int: _integer,
    str: _text,
    Path: _path,
    tuple[str, ...]: _names,
}


def bytes_of(gib: float | None) -> int:
    """Return the bytes of a size in GiB; 0 for None."""
    return int((gib or 0) * 2**30)


_SECRET = frozenset(
    {"token", "runtime_env"}
)  # settings whose values are never shown; an environment may contain secrets
NAMES = tuple(name for name in attrs.fields_dict(Settings) if name != "plugin_settings")


@attrs.frozen
class SettingRow:
    """A row of `djinn doctor` about a setting: the value as text, without secrets, and its origin."""

    name: str
    value: str
    origin: str


class ResolvedSettings(msgspec.Struct, frozen=True):
    """The effective settings.

    Attributes:
        origins: by name of setting: `argument`, `environment DJINN_X`, `file PATH` or `default`.
        file: the TOML file that was read, if any.
    """

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None = None

    def rows(self) -> tuple[SettingRow, ...]:
        """Return all settings in the order of `Settings`, without the settings of plugins."""
        return tuple(SettingRow(name, self._value_text(name), self.origins[name]) for name in NAMES)

    def _value_text(self, name: str) -> str:
        value = getattr(self.settings, name)
        if name in _SECRET and value:
            return HIDDEN
        return str(value) if isinstance(value, (str, Path)) else repr(value)


def config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the TOML file: `DJINN_CONFIG`, or `config.toml` in the user's configuration directory."""
    path = environ.get(FILE_VARIABLE)
    if path:
        return Path(path).expanduser()
    return configuration_directory() / "config.toml"


def resolve(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> ResolvedSettings:
    """Return the effective settings with the origin of each.

    Args:
        overrides: values by name of setting, from arguments or flags.
        environ: the environment, or None for the environment of this process.
        file: the TOML file, or None for the default path, which may be missing.

    Raises:
        ConfigurationError: a name is unknown, a value is malformed, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    path = file or config_file(environ)
    must_exist = file is not None or bool(environ.get(FILE_VARIABLE))
    values_by_name, was_read = _from_file(path, must_exist)
    plugin_settings = [*_take_plugin_tables(values_by_name, f"file {path}"), *_plugin_variables(environ)]
    values_by_name |= {n: (environ[v], f"environment {v}") for n in NAMES if (v := PREFIX + n.upper()) in environ}
    for name, value in (overrides or {}).items():
        if name == "plugin_settings":
            plugin_settings += _convert(name, value, "argument")
            continue
        _check_name(name, "argument")
        values_by_name[name] = (value, "argument")
    values = {name: _convert(name, value, origin) for name, (value, origin) in values_by_name.items()}
    origins = {name: values_by_name[name][1] if name in values_by_name else "default" for name in NAMES}
    return ResolvedSettings(
        Settings(**values, plugin_settings=tuple(plugin_settings)), origins, path if was_read else None
    )


def _take_plugin_tables(values: dict[str, tuple[Any, str]], origin: str) -> list[PluginSetting]:
    """Remove the tables `[plugins.NAME]` from `values`, and return their settings.

    `names` in `[plugins]` is the setting `plugins`.
    """
    table = values.get("plugins", (None, ""))[0]
    if not isinstance(table, dict):
        return []
    del values["plugins"]
    plugin_settings: list[PluginSetting] = []
    for plugin, settings in table.items():
        if isinstance(settings, dict):
            plugin_settings += [PluginSetting(plugin, name, value, origin) for name, value in settings.items()]
        elif plugin == "names":
            values["plugins"] = (settings, origin)
        else:
            raise ConfigurationError(
                f"There is no setting `plugins.{plugin}` ({origin}): settings of a plugin go into a table of its own, "
                "[plugins.NAME]; the list of plugins to use is `names` in [plugins]."
            )
    return plugin_settings


def _plugin_variables(environ: Mapping[str, str]) -> list[PluginSetting]:
    names = sorted(name for name in environ if name.startswith(PLUGIN_PREFIX))
    return [PluginSetting("", name.removeprefix(PLUGIN_PREFIX), environ[name], f"environment {name}") for name in names]


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with the prefix of settings but an unknown name, each with a similar name or ""."""
    known_names = {PREFIX + name.upper() for name in NAMES} | OTHER_VARIABLES
    unknown = sorted(
        v for v in environ if v.startswith(PREFIX) and not v.startswith(PLUGIN_PREFIX) and v not in known_names
    )
    # compared without the common prefix
    names = [name.removeprefix(PREFIX) for name in known_names]
    close = {v: difflib.get_close_matches(v.removeprefix(PREFIX), names, 1) for v in unknown}
    return {v: PREFIX + suggestions[0] if suggestions else "" for v, suggestions in close.items()}


def _from_file(path: Path, must_exist: bool) -> tuple[dict[str, tuple[Any, str]], bool]:
    try:
        with path.open("rb") as file:
            _check_writers(path, os.fstat(file.fileno()))
            content = file.read()
    except FileNotFoundError as error:
        if must_exist:
            raise ConfigurationError(
                f"There is no configuration file {path}: create it or unset {FILE_VARIABLE}."
            ) from error
        return {}, False
    except OSError as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}.") from error
    table = _parsed(path, content)
    for name in table:
        _check_name(name, f"file {path}")
    return {name: (value, f"file {path}") for name, value in table.items()}, True


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    import tomllib  # imported late, because most users have no such file

    try:
        return tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"The configuration file {path} cannot be read: {error}.") from error


def _check_writers(path: Path, status: os.stat_result) -> None:
    """Raise an error if other users can write the file: it names plugins to import and servers to use."""
    is_writable_by_others = status.st_uid not in {user_id(), 0} or mode_of(status) & stat.S_IWOTH
    if stat.S_ISREG(status.st_mode) and is_writable_by_others:
        raise ConfigurationError(
            f"The configuration file {path} can be written by other users, who could make Djinn run their code: chmod 644 it, "
            "or make a file of your own."
        )


def _check_name(name: str, origin: str) -> None:
    if name in NAMES:
        return
    if name == "plugin_settings":
        raise ConfigurationError(
            f"There is no setting `{name}` ({origin}): put the settings of a plugin in a table [plugins.NAME]."
        )
    close = difflib.get_close_matches(name, NAMES, 1)
    hint = f"did you mean `{close[0]}`?" if close else f"the settings are {', '.join(NAMES)}."
    raise ConfigurationError(f"There is no setting `{name}` ({origin}): {hint}")


def _convert(name: str, value: object, origin: str) -> Any:
    convert: Any = attrs.fields_dict(Settings)[name].converter
    try:
        return convert(value)
    except ValueError as error:
        text = HIDDEN if name in _SECRET else repr(value)
        raise ConfigurationError(f"The setting `{name}` {error}, and not {text} ({origin}).") from None
