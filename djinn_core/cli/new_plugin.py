"""Rendering the template of a plugin.

The template is itself a plugin, named `example`: rendering copies it and puts the new name in place of that word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import djinn_core
from djinn_core.errors import ConfigurationError

_PACKAGE = Path(djinn_core.__file__).parent
# In an installed Djinn the template lies inside the package, in a checkout beside it.
_PLACES = (_PACKAGE / "templates" / "plugin", _PACKAGE.parent / "templates" / "plugin")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_KINDS = "kinds"


def render(name: str, kind: str, directory: Path) -> Path:
    """Write a plugin `name` of `kind` into a new folder in `directory`, and return the folder.

    Raises:
        ConfigurationError: the name cannot be one, the folder exists, or there is no template.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot name a plugin: use small letters, digits, `-` or `_`, as in my-plugin"
        )
    template = template_folder()
    folder = directory / f"djinn-{_dashed(name)}"
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: choose another name or directory, or remove it")
    for source, target in _files(template, kind):
        path = folder / _renamed(str(target), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")
    return folder


def template_folder() -> Path:
    """Path of the template.

    Raises:
        ConfigurationError: nowhere.
    """
    for place in _PLACES:
        if place.is_dir():
            return place
    raise ConfigurationError(f"the template of a plugin is missing: {' and '.join(map(str, _PLACES))} do not exist")


def _files(template: Path, kind: str) -> Iterator[tuple[Path, Path]]:
    """The template's files with their places in the plugin; those of the kind replace those of the same place."""
    found: dict[Path, Path] = {}
    for root in (template, template / _KINDS / kind):
        for path in sorted(root.rglob("*")):
            place = path.relative_to(root)
            if path.is_file() and place.parts[0] != _KINDS and "__pycache__" not in place.parts:
                found[place] = path
    return ((source, place) for place, source in found.items())


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _renamed(text: str, name: str) -> str:
    underscored = name.replace("-", "_")
    text = text.replace("djinn-example", f"djinn-{_dashed(name)}").replace("example", underscored)
    return text.replace("Example", underscored.title().replace("_", ""))
