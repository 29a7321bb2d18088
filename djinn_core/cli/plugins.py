"""`djinn plugins` lists built-in, installed and broken plugins. `djinn plugins new` writes a skeleton of a new plugin.

The skeleton is a template: a plugin named `example`. Its name is replaced by the name of the new plugin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import djinn_core
from djinn_core.errors import ConfigurationError
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import KINDS
from djinn_core.registry.registry import survey
from djinn_core.registry.report import PluginRow
from djinn_core.registry.selection import Selection
from djinn_core.settings import resolve

_PACKAGE = Path(djinn_core.__file__).parent
# In an installed Djinn the template lies inside the package, in a checkout beside it.
_PATHS = (_PACKAGE / "templates" / "plugin", _PACKAGE.parent / "templates" / "plugin")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_KINDS = "kinds"


def render(name: str, kind: str, directory: Path) -> Path:
    """Write a plugin `name` of `kind` into a new folder in `directory`. Return the folder.

    Raises:
        ConfigurationError: the name is invalid, the folder exists, or the template is missing.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot name a plugin: use small letters, digits, `-` or `_`, as in my-plugin"
        )
    template = template_folder()
    folder = directory / f"djinn-{_with_dashes(name)}"
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: choose another name or directory, or remove it")
    for source, target in _files(template, kind):
        path = folder / _with_name(str(target), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("djinn.KIND", f"djinn.{kind}")
        path.write_text(_with_name(text, name), encoding="utf-8")
    return folder


def template_folder() -> Path:
    """Return the path of the template.

    Raises:
        ConfigurationError: the template is missing.
    """
    for path in _PATHS:
        if path.is_dir():
            return path
    raise ConfigurationError(
        f"the template of a plugin is missing: {' and '.join(map(str, _PATHS))} do not exist. Install Djinn again"
    )


def _files(template: Path, kind: str) -> Iterator[tuple[Path, Path]]:
    """Yield each template file with its path in the new plugin. Files of the kind override common files at the same path."""
    files: dict[Path, Path] = {}
    for root in (template, template / _KINDS / kind):
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and relative.parts[0] != _KINDS and "__pycache__" not in relative.parts:
                files[relative] = path
    return ((source, relative) for relative, source in files.items())


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _with_name(text: str, name: str) -> str:
    underscored = name.replace("-", "_")
    text = text.replace("djinn-example", f"djinn-{_with_dashes(name)}").replace("example", underscored)
    return text.replace("Example", underscored.title().replace("_", ""))


_STYLES = {"active": "green", "failed": "red", "disabled": "yellow", "unselected": "dim"}


@click.group("plugins", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per plugin.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List built-in, installed and broken plugins.

    DJINN_PLUGINS=a,b uses the built-in plugins and only a and b of the others; an empty value uses none of the others.
    DJINN_DISABLE=x disables a plugin. DJINN_STRICT=1 makes a broken plugin an error. DJINN_TRACE_PLUGINS=1 logs each
    call of a hook.
    """
    if ctx.invoked_subcommand is not None:
        return
    registry, _ = survey(Selection.from_settings(resolve().settings), builtins=builtin_plugins())
    rows = registry.rows
    if as_json:
        click.echo(json.dumps([attrs.asdict(row) | {"processes": row.processes} for row in rows], indent=2))
        return
    console = Console()
    console.print(_table(rows))
    for row in rows:
        if row.error:
            console.print(Text.assemble((f"{row.name}: ", "red"), row.error), highlight=False, soft_wrap=True)


def _table(rows: tuple[PluginRow, ...]) -> Table:
    columns = ("name", "kind", "called in", "distribution", "version", "status")
    table = Table(*columns, box=SIMPLE_HEAD, show_edge=False)
    for row in rows:
        status = f"[{_STYLES[row.status]}]{row.status}[/]"
        table.add_row(row.name, row.kind, ", ".join(row.processes), row.distribution, row.version, status)
    return table


@command.command("new")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--kind",
    type=click.Choice([kind.name for kind in KINDS]),
    default="patterns",
    show_default=True,
    help="What it adds.",
)
def new(name: str, directory: Path, kind: str) -> None:
    """Write the skeleton of a plugin NAME into a new folder in DIRECTORY.

    The skeleton is an installable package that passes its tests. DIRECTORY is the current directory by default.
    """
    folder = render(name, kind, directory)
    click.echo(f"{folder} holds a plugin of kind {kind}. Install it with `pip install -e {folder}`, see it with")
    click.echo(f"`djinn plugins`, test it with `python -m pytest {folder}`.")
