"""The installation and its servers: `djinn doctor`, `status`, `kill`, `published`, `login`, `logout` and `servers`.

This module is imported for `djinn --help`, so the rest is imported where it is needed.

- `status_commands`, `login_commands`, `doctor_command`: the command line. `logins`, `killing`: what it does.
- `status_text`: what servers report; `coordinator`: the same as objects. `diagnosis`: what is wrong with the installation.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import pluggy

djinn_api_version = "2.0"

hookimpl = pluggy.HookimplMarker("djinn")


@hookimpl
def djinn_register_commands() -> Iterable[click.Command]:
    """The commands about the installation and its servers."""
    from djinn_commands.servers.doctor_command import doctor
    from djinn_commands.servers.login_commands import login, logout, servers
    from djinn_commands.servers.status_commands import kill, published, status

    return [doctor, login, logout, servers, kill, published, status]
