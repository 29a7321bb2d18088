"""Names and summaries of plugins' commands for `djinn --help`, which neither loads settings nor waits for PyTorch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Final

COMMAND_GROUP: Final = "djinn.commands"


def list_commands(
    width: int, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Summaries of at most `width` characters by name of a command, and a sentence for each plugin that cannot say.

    Plugins are asked whatever the settings say: whether a command can be used is found out when it is run.
    """
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=COMMAND_GROUP)
    summaries: dict[str, str] = {}
    failures = []
    for point in sorted(entry_points, key=lambda point: point.name):
        try:
            commands = point.load().djinn_register_commands()
            summaries = {command.name: command.get_short_help_str(width) for command in commands} | summaries
        except Exception as error:
            origin = f" ({point.dist.name} {point.dist.version})" if point.dist else ""
            failures.append(
                f"The plugin {point.name!r}{origin} cannot list its commands: {type(error).__name__}: {error}."
            )
    return summaries, failures
