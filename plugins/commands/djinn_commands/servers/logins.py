"""Storage of log-ins for `djinn login`, `servers` and `logout`."""

from __future__ import annotations

from pathlib import Path

from djinn_client.runtime.connecting.logins import Login, find_login, login_names, login_path
from djinn_core.errors import ConfigurationError
from djinn_core.protocol.connection_file import write_connection_file
from djinn_core.system.private_directories import private_directory


def save_login(login: Login) -> Path:
    """Store a log-in, in place of an earlier log-in of its name. Return the path of the file.

    Raises:
        ConfigurationError: the name is invalid, or other users could write to the file.
    """
    path = login_path(login.name)
    try:
        private_directory(path.parent, "log-ins")
    except OSError as error:
        raise ConfigurationError(f"cannot create the directory of log-ins {path.parent}: {error}") from error
    write_connection_file(path, login.content)
    return path


def list_logins() -> tuple[Login, ...]:
    """Return all log-ins, sorted by name.

    Raises:
        ConfigurationError: a file is unreadable.
    """
    return tuple(find_login(name) for name in login_names())


def forget_login(name: str) -> None:
    """Remove a log-in by name, even if its file is unreadable.

    Raises:
        ConfigurationError: the log-in does not exist, or cannot be removed.
    """
    if name not in login_names():
        find_login(name)  # raises an error that lists the names
    try:
        login_path(name).unlink()
    except OSError as error:
        raise ConfigurationError(f"cannot remove the log-in {name!r}: {error}") from error
