"""Provenance lines of runs, for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Environment that a run was made with."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}"} | {
        name: version(name) for name in ("torch", "transformers", "diffusers")
    }


def made_by(command: str) -> str:
    """The line that says how a page came to be."""
    return f"Made by `{command}`: {', '.join(f'{name} {number}' for name, number in versions().items())}."


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
