"""Plans for a program or a model that does not run: `djinn explain` and `djinn plan`.

This module is imported for `djinn --help`, so the rest is imported where it is needed.

- `plan_command`, `explain_command`: the command line. `model`: models without weights, and the programs of their steps.
- `fit`: if a model fits on servers as they are. `peak`: the most memory that a program holds at once.
- `forecast`: what a plan for a described cluster means for memory, latency and throughput.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """The commands `explain` and `plan`."""
    from djinn_commands.planning.explain_command import explain
    from djinn_commands.planning.plan_command import plan

    return [explain, plan]
