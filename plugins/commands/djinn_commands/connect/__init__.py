"""A server and jobs on a machine that is reached over ssh, without root there.

This module is imported for `djinn --help`, so the rest is imported where it is needed.

- `ssh`: command lines of OpenSSH's client, and what is run over one connection. `scripts/`: what runs on the remote machine, for POSIX
  sh alone. `records`: what this machine keeps of each server.
- `survey`: what is there, and what is made of it. `wheels`: what is sent. `connecting`: the steps of `djinn connect`. `tunnel`, `keeper`:
  the process that keeps the tunnel open.
- `project_files`: which files of a project are sent, and which are not. `jobs`: jobs on the remote machine. `job_runner`: the process there
  that is a job's parent.
- `connect_commands`, `job_commands`: the command line.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """The commands `connect` and `disconnect`, and those about jobs."""
    from djinn_commands.connect.connect_commands import connect, disconnect
    from djinn_commands.connect.job_commands import fetch, jobs, logs, stop, submit

    return [connect, disconnect, submit, jobs, logs, stop, fetch]
