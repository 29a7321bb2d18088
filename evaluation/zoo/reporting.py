"""Provenance lines of runs, for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the environment of a run."""
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}"} | {
        name: version(name) for name in ("torch", "transformers", "diffusers")
    }


def made_by(command: str) -> str:
    """Return the provenance line of a page."""
    return f"Made by `{command}`: {', '.join(f'{name} {number}' for name, number in versions().items())}."


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
