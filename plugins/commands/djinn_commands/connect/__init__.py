"""A server and jobs on a remote machine over ssh, without root access.

This module is imported for `djinn --help`, so the other modules are imported when they are needed.

- `ssh`: command lines of OpenSSH's client, and scripts over one connection. `scripts/`: POSIX sh scripts for the remote
  machine. `records`: local files about each server.
- `survey`: facts about the remote machine, and decisions. `wheels`: files to send. `connecting`: the steps of `djinn
  connect`. `tunnel`, `keeper`: the process that keeps the tunnel open.
- `project_files`: selects the files of a project to send. `jobs`: jobs on the remote machine. `job_runner`: the remote
  parent process of a job.
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
    """Return the commands `connect` and `disconnect`, and the job commands."""
    from djinn_commands.connect.connect_commands import connect, disconnect
    from djinn_commands.connect.job_commands import fetch, jobs, logs, stop, submit

    return [connect, disconnect, submit, jobs, logs, stop, fetch]
