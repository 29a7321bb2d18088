"""The demo: three real programs, each run here and on a server of its own, side by side.

It is written as a user would write it: it imports `djinn` and PyTorch, and reaches into nothing. This module is imported for
`djinn --help`, so it imports neither.

- `command`: `djinn demo`. `task`: what a demonstration is. `embeddings`, `generation`, `training`: the three.
- `server`: a `djinn serve` process that lives as long as the demo.
- `measure`: runs a task locally and remotely and keeps what was seen. `table`: shows it. `show`: the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Register the command `demo`."""
    from djinn_commands.demo.command import demo

    return [demo]
