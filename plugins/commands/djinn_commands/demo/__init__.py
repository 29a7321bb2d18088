"""The demo: three programs that run locally and on a server of the demo, side by side.

It uses only the public API of `djinn` and PyTorch, as a user would. This module is imported for `djinn --help`, so it
imports neither.

- `command`: `djinn demo`. `task`: interface of a demonstration. `embeddings`, `generation`, `training`: the three
  programs.
- `server`: a `djinn serve` process for the duration of the demo.
- `measure`: runs a task locally and remotely, and collects measurements. `table`: shows them. `show`: runs the whole
  demo.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Return the command `demo`."""
    from djinn_commands.demo.command import demo

    return [demo]
