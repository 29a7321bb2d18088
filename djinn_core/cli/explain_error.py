"""`djinn explain-error`: the section of docs/errors.md about a code."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

import click

import djinn_core
from djinn_core.errors import ConfigurationError

_PACKAGE: Final = Path(djinn_core.__file__).parent
# In an installed Djinn the page lies inside the package, in a checkout among the documents.
_PATHS: Final = (_PACKAGE / "docs" / "errors.md", _PACKAGE.parent / "docs" / "errors.md")
_SECTION: Final = re.compile(r"^### `([a-z-]+)`\n+(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_CLASS: Final = re.compile(r"`(\w+)`:")
_LINK: Final = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


@click.command(name="explain-error")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Show causes and cures of an error.

    CODE is the code in a traceback, or the name of the error's class. Without CODE, list all codes.
    """
    sections = read_sections()
    if code is None:
        for name, text in sections.items():
            click.echo(f"{name:28}{text.partition(chr(10))[0].replace('`', '')}")
        return
    by_class = {match[1]: name for name, text in sections.items() if (match := _CLASS.match(text))}
    name = by_class.get(code.rpartition(".")[2], code)
    if name not in sections:
        close = difflib.get_close_matches(name, [*sections, *by_class], 1)
        hint = f"did you mean {close[0]!r}?" if close else "`djinn explain-error` lists them"
        raise ConfigurationError(f"there is no error code {code!r}: {hint}")
    click.echo(f"{name}\n\n{_LINK.sub(_link_text, sections[name])}")


def read_sections() -> dict[str, str]:
    """Return the section of docs/errors.md about each code, by code.

    Raises:
        ConfigurationError: the page is not installed.
    """
    for path in _PATHS:
        if path.is_file():
            return {code: text.strip() for code, text in _SECTION.findall(path.read_text(encoding="utf-8"))}
    raise ConfigurationError("docs/errors.md is not part of this installation: install Djinn again")


def _link_text(link: re.Match[str]) -> str:
    return f"docs/{link[2]}" if not link[2].startswith("http") else link[2]
