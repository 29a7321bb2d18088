"""Planning of programs and models without running them: `djinn explain` and `djinn plan`.

This module is imported for `djinn --help`, so the other modules are imported when they are needed.

- `plan_command`, `explain_command`: the command line. `model`: models without weights, and the programs of their steps.
- `fit`: whether a model fits on running servers. `peak`: peak memory of a program.
- `forecast`: memory, latency and throughput of a plan for a described cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Return the commands `explain` and `plan`."""
    from djinn_commands.planning.explain_command import explain
    from djinn_commands.planning.plan_command import plan

    return [explain, plan]
