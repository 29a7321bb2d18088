"""The installation and its servers: `djinn doctor`, `status`, `kill`, `published`, `login`, `logout` and `servers`.

This module is imported for `djinn --help`, so the other modules are imported when they are needed.

- `status_commands`, `login_commands`, `doctor_command`: the command line. `logins`, `killing`: their implementation.
- `status_text`: reports of servers as text; `coordinator`: the same reports as objects. `diagnosis`: problems of the
  installation.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """Return the commands about the installation and its servers."""
    from djinn_commands.servers.doctor_command import doctor
    from djinn_commands.servers.login_commands import login, logout, servers
    from djinn_commands.servers.status_commands import kill, published, status

    return [doctor, login, logout, servers, kill, published, status]
