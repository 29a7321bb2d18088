"""Checks of `djinn doctor`: versions, plugins, settings with their origins, servers, and problems with advice."""

from __future__ import annotations

import os
import platform
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from djinn_client.runtime.connecting.servers import ask_each, ask_status, find_servers
from djinn_client.runtime.planning.constraints import policy_for
from djinn_core.errors import ConfigurationError, DjinnError, PluginError
from djinn_core.hookspecs.transports import Transport
from djinn_core.planning.request import growth_intolerant_plugins
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.discovery import of_another_release
from djinn_core.registry.embedded_executors import INSTALL_SERVER, check_starter
from djinn_core.registry.registry import Registry, survey
from djinn_core.registry.report import PluginRow
from djinn_core.registry.selection import Selection
from djinn_core.settings import (
    PREFIX,
    ResolvedSettings,
    SettingRow,
    Settings,
    config_file,
    resolve,
    unknown_variables,
)
from djinn_core.torch_private import missing
from djinn_core.wire.messages import Status

T = TypeVar("T")

_INSTALL = "Install Djinn again: run `make install PYTHON=python` in a checkout, or `pip install FOLDER/*.whl` from a FOLDER of its wheels."
_OPTIONAL = ("djinn-native", "djinn-server")  # packages that clients need, and packages that servers need
PATIENCE = 5.0  # timeout in seconds per server, because a person is waiting


@attrs.frozen
class Finding:
    """A problem of the installation.

    Attributes:
        what: the problem, as a sentence.
        mend: advice to the user, as sentences.
        fatal: True if Djinn cannot work until the problem is fixed.
    """

    what: str
    mend: str
    fatal: bool = True


@attrs.frozen
class ServerRow:
    """The reply of a configured server.

    Attributes:
        url: address of the server.
        reachable: True if the server accepts this client.
        detail: version and devices of a reachable server, or the error.
        mend: advice to the user if the server is not reachable.
    """

    url: str
    reachable: bool
    detail: str
    mend: str = ""


@attrs.frozen
class Diagnosis:
    """All results of the checks.

    Attributes:
        versions: version by package, as `versions` returns.
        plugins: all installed plugins with their state.
        settings: all settings with value and origin.
        configuration_file: path of the configuration file, or empty if none is used.
        servers: replies of the configured servers.
        findings: all problems.
        transports: for each transport, facts about it, such as versions of its libraries.
    """

    versions: Mapping[str, str]
    plugins: tuple[PluginRow, ...]
    settings: tuple[SettingRow, ...]
    configuration_file: str
    servers: tuple[ServerRow, ...]
    findings: tuple[Finding, ...]
    transports: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def well(self) -> bool:
        """Return True if there is no fatal finding."""
        return not any(finding.fatal for finding in self.findings)


def diagnose(environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Run all checks of this installation and return their results. Errors of Djinn become findings. Nothing is changed.

    `environ`: environment variables. Default: those of this process.
    """
    environ = os.environ if environ is None else environ
    findings = [*check_versions(versions()), *check_torch()]
    resolved_settings = _caught(lambda: resolve(environ=environ), findings, "Correct the value that the message names.")
    if resolved_settings is None:
        findings += check_variables(environ, ())
        return Diagnosis(versions(), (), (), str(config_file(environ)), (), tuple(findings))
    findings += check_file(resolved_settings)
    registry = (
        _caught(
            lambda: load(resolved_settings),
            findings,
            "Correct the value that the message names, or disable the plugin.",
        )
        or Registry()
    )
    findings += (*check_plugins(registry.rows, resolved_settings.settings), *check_variables(environ, registry.rows))
    findings += check_growth(registry, resolved_settings.settings)
    findings += check_server_side(registry, resolved_settings.settings)
    _caught(check_starter, findings, "Install djinn and djinn-server of one release.")
    mend = "Correct the setting or the file that the message names."
    servers = _caught(lambda: server_rows(resolved_settings.settings, registry.transports), findings, mend) or ()
    findings += check_servers(servers)
    rows = (
        tuple(_with_policy(row, resolved_settings.settings, registry) for row in resolved_settings.rows())
        + registry.plugin_settings
    )
    transport_facts = {one.name: facts for one in registry.transports if (facts := _facts(one))}
    return Diagnosis(
        versions(),
        registry.rows,
        rows,
        str(resolved_settings.file or ""),
        tuple(servers),
        tuple(findings),
        transport_facts,
    )


def _with_policy(row: SettingRow, settings: Settings, registry: Registry) -> SettingRow:
    """Return the row of a setting. If it is `placement_policy` without a value, fill in the default policies and the reason."""
    if row.name != "placement_policy" or settings.placement_policy:
        return row
    one, several = (policy_for(settings, registry.placement_policies, devices) for devices in (1, 2))
    if one == several:
        return SettingRow(row.name, one, f"{row.origin}: no policy for several executors is in use")
    return SettingRow(
        row.name, f"{several} over several executors, {one} on one", f"{row.origin}: {several} is installed"
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, Djinn, its dependencies, and installed optional packages, by name.

    A dependency that is not installed has an empty version.
    """
    installed = {"python": platform.python_version()}
    for name in ("djinn", *(name for name in required_versions() if name != "python"), *_OPTIONAL):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name not in _OPTIONAL:
                installed[name] = ""
    return installed


def required_versions() -> dict[str, str]:
    """Return the minimum versions of Python and of the packages that `djinn` requires, by name, without extras."""
    try:
        package = metadata.metadata("djinn")
    except metadata.PackageNotFoundError:  # a finding of its own
        return {}
    lines = (line.partition(";") for line in package.get_all("Requires-Dist") or ())
    required = [requirement for requirement, _, marker in lines if "extra" not in marker]
    return dict(_requirement(text) for text in (f"python{package['Requires-Python']}", *required))


def _requirement(text: str) -> tuple[str, str]:
    """Return name and minimum version of a requirement such as `torch>=2.11`. Without a minimum, the version is empty."""
    match = re.match(r"([\w.-]+)(?:[^>]*>=\s*([\d.]+))?", text)
    assert match is not None
    return match[1], match[2] or ""


def check_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a problem for each package that is missing, too old, of another release, or of another project named djinn.

    `versions`: versions by name, as `versions` returns.
    """
    required = required_versions()
    for name, version in versions.items():
        if not version:
            yield Finding(f"{name} is not installed.", _INSTALL)
        elif _numbers(version) < _numbers(required.get(name, "")):
            label = "Python" if name == "python" else name
            yield Finding(f"{label} {version} is too old.", f"Install {label} {required[name]} or newer.")
        elif name.startswith("djinn-") and version != versions["djinn"] and _is_ours(versions["djinn"]):
            yield Finding(
                f"{name} {version} does not work with djinn {versions['djinn']}.",
                "Install both of one release, from one checkout or from one folder of wheels.",
            )
    if versions["djinn"] and not _is_ours(versions["djinn"]):
        yield Finding(
            f"The installed `djinn` {versions['djinn']} is another project of that name.",
            f"Run `pip uninstall djinn`. {_INSTALL}",
        )


def _is_ours(version: str) -> bool:
    """Return True if a version of the distribution `djinn` is of this project. The other project of this name has lower versions."""
    return _numbers(version) >= (26,)


def check_torch() -> Iterator[Finding]:
    """Yield a problem for each private torch function that interception needs and this torch lacks."""
    for name in missing():
        yield Finding(
            f"The installed PyTorch has no {name}, which the remote device needs.",
            "Install a version of PyTorch that docs/versions.md lists.",
        )


def check_variables(environ: Mapping[str, str], plugins: Iterable[PluginRow]) -> Iterator[Finding]:
    """Yield a problem for each environment variable that resembles Djinn's variables but is unknown.

    Variables that begin with a plugin's name are ignored.
    """
    owned = tuple(f"{PREFIX}{row.name.upper()}_" for row in plugins if row.name.isidentifier())
    for variable, suggestion in unknown_variables(environ).items():
        if not suggestion and variable.startswith(owned):
            continue
        hint = f"Did you mean {suggestion}?" if suggestion else "Unset it, or correct its name (docs/settings.md)."
        yield Finding(f"The environment sets {variable}, which is not a setting of Djinn.", hint, fatal=False)


def check_file(resolved: ResolvedSettings) -> Iterator[Finding]:
    """Yield a problem for each configuration or connection file with a token that other users can read."""
    settings = resolved.settings
    in_file = resolved.origins["token"].startswith("file ")
    if resolved.file is not None and in_file and _is_readable_by_others(resolved.file):
        yield Finding(
            f"Other users can read the token in {resolved.file}.", f"Run `chmod 600 {resolved.file}`.", fatal=False
        )
    connection = settings.connection_file
    # A missing file is reported when servers are asked.
    if connection is not None and connection.exists() and _is_readable_by_others(connection):
        yield Finding(f"Other users can read the token in {connection}.", f"Run `chmod 600 {connection}`.", fatal=False)


def load(resolved: ResolvedSettings) -> Registry:
    """Return the registry of the plugins in use. Its `rows` also have the unusable plugins."""
    survey_result, _ = survey(Selection.from_settings(resolved.settings), builtins=builtin_plugins())
    return survey_result


def check_plugins(rows: tuple[PluginRow, ...], settings: Settings) -> Iterator[Finding]:
    """Yield a problem for each plugin that is unusable or of another release.

    An unusable plugin is fatal if it is requested by name, or if all must load.
    """
    plugin_names = settings.plugins or ()
    for row in rows:
        if row.status == "active" and (advice := of_another_release(row.distribution, row.version)):
            yield Finding(f"{row.label} is in use.", f"{advice[0].upper()}{advice[1:]}.", fatal=False)
        if row.status != "failed":
            continue
        if row.name in plugin_names:
            mend = "Install or repair it, or remove it from the setting `plugins`."
        else:
            mend = f"Update or uninstall it, or disable it with DJINN_DISABLE={row.name}."
        yield Finding(row.error or f"{row.label} failed.", mend, fatal=settings.strict or row.name in plugin_names)


def check_growth(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Yield a problem if plugins in use prevent the reuse of plans when sizes grow more than fourfold."""
    policies = [policy_for(settings, registry.placement_policies, devices) for devices in (1, 2)]
    growing = (
        growth_intolerant_plugins(registry, exact=settings.exact, policy=p, scheduler=settings.scheduler)
        for p in policies
    )
    names = list(dict.fromkeys(name for names_of_policy in growing for name in names_of_policy))
    if names:
        yield Finding(
            f"The plugins {', '.join(names)} prevent the reuse of plans if sizes grow more than fourfold.",
            "In the author's classes whose decisions do not depend on sizes, set `tolerates_growth = True`. Or disable the plugins.",
            fatal=False,
        )


def check_server_side(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Yield a problem for each setting that executors or `djinn serve` on this machine would refuse.

    If djinn-server is not installed, report only a missing server.
    """
    if find_spec("djinn_server") is not None:
        yield from check_executor_choices(registry, settings)
        yield from check_authenticators(registry, settings)
        yield from check_assignment(registry, settings)
    elif not (settings.servers or settings.connection_file):
        yield Finding(
            "No server is configured, and the package djinn-server, which runs programs on this machine, is not installed.",
            f"Name a server (`djinn login`, or the setting `servers`). {INSTALL_SERVER}",
            fatal=False,  # the program may name a server itself
        )


def check_executor_choices(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Yield a problem for each compiler in the setting that no plugin offers. An executor would not start with it."""
    there = [one.name for one in registry.compilers]
    for name in settings.compilers:
        if name not in there:
            yield Finding(
                f"The setting `compilers` names {name!r}, which no plugin in use offers.",
                f"Install its plugin, or correct the setting. Available: {', '.join(there) or 'none'}.",
                fatal=not (settings.servers or settings.connection_file),
            )


def check_authenticators(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Yield a problem for each authenticator in the setting that no plugin offers. `djinn serve` would not start with it."""
    there = [one.name for one in registry.authenticators]
    for name in settings.authenticators:
        if name not in there:
            yield Finding(
                f"The setting `authenticators` names {name!r}, which no plugin in use offers.",
                f"Install its plugin on the server, or correct the setting. Available: {', '.join(there) or 'none'}.",
                fatal=False,
            )


def check_assignment(registry: Registry, settings: Settings) -> Iterator[Finding]:
    """Yield a problem if no plugin offers the assignment policy of the setting. `djinn serve` would not start with it."""
    there = [attrs.fields(Settings).assignment.default, *(one.name for one in registry.assignment_policies)]
    if settings.assignment not in there:
        yield Finding(
            f"The setting `assignment` names {settings.assignment!r}, which no plugin in use offers.",
            f"Install its plugin on the server, or correct the setting. Available: {', '.join(there)}.",
            fatal=False,
        )


def server_rows(settings: Settings, transports: Sequence[Transport]) -> tuple[ServerRow, ...]:
    """Return the reply of each configured server. Return an empty tuple if programs use an embedded executor."""
    servers = find_servers(settings, transports)
    if servers is None:
        return ()
    timeout = min(settings.connect_timeout, PATIENCE)
    return tuple(_server_row(*answer) for answer in ask_each(servers, transports, timeout, ask_status))


def _server_row(url: str, status: Status | DjinnError) -> ServerRow:
    if isinstance(status, DjinnError):
        return ServerRow(url, reachable=False, detail=str(status), mend=_server_advice(status))
    several = len(status.executors) > 1
    executor_names = (f"{n} {e.device.id}" if several else e.device.id for n, e in enumerate(status.executors))
    devices = ", ".join(executor_names) or "no executor yet"
    return ServerRow(url, reachable=True, detail=f"djinn {status.version}, {devices}")


def _server_advice(error: DjinnError) -> str:
    if isinstance(error, PluginError):
        return "`djinn plugins` shows the installed transports."
    return f"`djinn explain-error {error.code}` shows causes and solutions."


def check_servers(rows: tuple[ServerRow, ...]) -> Iterator[Finding]:
    """Yield a problem for each server that is not reachable. The problems are fatal if no server is reachable."""
    useless = not any(row.reachable for row in rows)
    for row in rows:
        if not row.reachable:
            what = row.detail if row.url in row.detail else f"{row.url}: {row.detail}"
            yield Finding(what, row.mend, fatal=useless)


def _caught(ask: Callable[[], T], findings: list[Finding], mend: str) -> T | None:
    """Return the result of `ask`, or None if it raises a `DjinnError`. Append that error to `findings` with the advice `mend`."""
    try:
        return ask()
    except DjinnError as error:
        kind = "The configuration is wrong: " if isinstance(error, ConfigurationError) else ""
        findings.append(Finding(f"{kind}{error}", mend))
        return None


def _facts(transport: Transport) -> str:
    """Return a transport's facts about itself, or the error that it raised."""
    try:
        return transport.facts()
    except Exception as error:
        return f"failed: {error!r}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _is_readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


_NOTHING = {"None": "", "()": ""}  # values of settings without information


def show(diagnosis: Diagnosis, console: Console, *, everything: bool = False) -> None:
    """Print servers and problems.

    `everything`: True to first print versions, plugins, settings and facts of transports.
    """
    if everything:
        _show_installation(diagnosis, console)
    for server in diagnosis.servers:
        _say(console, f"Server {server.url}: {server.detail if server.reachable else 'not reachable, see below'}")
    if not diagnosis.servers and diagnosis.well:
        _say(console, "No server is configured. An executor on this machine starts at first use.")
    _show_findings(diagnosis, console)
    if not everything:
        _say(console, "`djinn doctor --all` also shows versions, plugins and settings.")


def _show_installation(diagnosis: Diagnosis, console: Console) -> None:
    versions = list(diagnosis.versions.items())
    plugins = [
        (row.name, row.kind, ", ".join(row.processes), f"{row.distribution} {row.version}", row.status)
        for row in diagnosis.plugins
    ]
    settings = [(row.name, _NOTHING.get(row.value, row.value), row.origin) for row in diagnosis.settings]
    console.print(_pairs("Versions", ("package", "version"), versions), "")
    console.print(_pairs("Plugins", ("name", "kind", "called in", "from", "status"), plugins), "")
    console.print(_pairs("Settings", ("name", "value", "origin"), settings), "")
    _say(console, f"Configuration file: {diagnosis.configuration_file or 'none'}")
    for name, facts in diagnosis.transports.items():
        _say(console, f"Transport {name}: {facts}")
    console.print()


def _show_findings(diagnosis: Diagnosis, console: Console) -> None:
    for finding in diagnosis.findings:
        console.print("[red]wrong[/red]  " if finding.fatal else "[yellow]note[/yellow]   ", end="")
        _say(console, f"{finding.what}\n       {finding.mend}")
    if diagnosis.well:
        console.print("[green]All is well.[/green]" if not diagnosis.findings else "[green]Djinn works.[/green]")


def _say(console: Console, text: str) -> None:
    """Print text without inserted line breaks, so that addresses can be copied and searched for."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _pairs(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
