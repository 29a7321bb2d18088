"""Write the parts of docs/ that come from the code: tables of settings, plugin kinds and events.

A part lies between `<!-- NAME: written by packaging/write_pages.py -->` and `<!-- end -->`. `--check` fails if a part is not current.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from djinn.testing.observers import EVENTS
from djinn_core.registry.kinds import KINDS, Kind
from djinn_core.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(<!-- (\w+): written by packaging/write_pages\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# An attribute of a docstring: its names, and its text up to the next attribute.
ATTRIBUTE = re.compile(r"^    ((?:\w+, )*\w+): (.+?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)


def table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def format_default(value: Any) -> str:
    """Return a default as a configuration file spells it, or "" for a default without a value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value else ""


def settings() -> str:
    """Return a table of all settings, from the docstring of `Settings`."""
    descriptions = {
        name: one_line(text)
        for names, text in ATTRIBUTE.findall(inspect.getdoc(Settings) or "")
        for name in names.split(", ")
    }
    defaults = attrs.asdict(Settings(), recurse=False)
    return table(
        ("setting", "default", "meaning"),
        ((f"`{name}`", format_default(default), descriptions[name]) for name, default in defaults.items()),
    )


def suite_of(kind: Kind) -> str:
    names = vars(importlib.import_module(f"djinn.testing.{kind.name}"))
    return next(name for name in names if name.endswith("Conformance"))


def kinds() -> str:
    """Return a table of the kinds of plugins, with the first sentence of each base class's docstring."""

    def row(kind: Kind) -> Sequence[str]:
        base = kind.base
        own = base.__module__.startswith("djinn")
        text = one_line((inspect.getdoc(base) or "").split("\n\n")[0]) if own else "A command of click"
        methods = ", ".join(f"`{name}`" for name in sorted(getattr(base, "__abstractmethods__", ())))
        place = f"../{kind.package}/hookspecs/{kind.name}.py"
        processes = ", ".join(kind.processes)
        return (
            f"`{kind.name}`",
            f"[`{kind.base_name}`]({place})",
            methods,
            f"`{suite_of(kind)}`",
            processes,
            re.split(r"(?<=[a-z`])\. ", text)[0],
        )

    return table(("kind", "base class", "methods to implement", "suite", "process", "purpose"), map(row, KINDS))


def events() -> str:
    """Return a table of the events that an `Observer` gets, by process."""
    rows = (
        (process, f"`{name}`", ", ".join(f"`{fact}`" for fact in facts))
        for process, result in EVENTS.items()
        for name, facts in result.items()
    )
    return table(("process", "event", "facts"), rows)


PARTS: Mapping[str, Callable[[], str]] = {"settings": settings, "kinds": kinds, "events": events}


def renew_parts(text: str) -> str:
    """Return the text of a page with all generated parts renewed."""
    return PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page is not current")
    arguments = parser.parse_args()
    stale = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := renew_parts(text)) != text:
            stale.append(page.name)
            if not arguments.check:
                page.write_text(current, encoding="utf-8")
    if arguments.check and stale:
        print(f"Not current: {', '.join(stale)}. Run `python packaging/write_pages.py`.", file=sys.stderr)
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
