"""Log-ins: named servers, each with addresses, token and certificate in a file of mode 0600."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file
from djinn_core.system.directories import configuration_directory

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX: Final = ".json"


class Login(msgspec.Struct, frozen=True):
    """A server to which the user has logged in.

    Attributes:
        name: the name that the user chose.
        content: content of the log-in's file: addresses, token and fingerprint.
    """

    name: str
    content: ConnectionFile


def is_login_name(text: str) -> bool:
    """Return True if `text` can be the name of a log-in. Addresses of servers cannot be names."""
    return _NAME.fullmatch(text) is not None


def find_login(name: str) -> Login:
    """Return the log-in with this name.

    Raises:
        ConfigurationError: the log-in does not exist, or its file is unreadable.
    """
    path = login_path(name)
    if not path.exists():
        names = ", ".join(login_names()) or "none"
        raise ConfigurationError(
            f"there is no log-in {name!r} (log-ins: {names}). Create it with `djinn login ADDRESS --name {name}`. If {name!r} "
            "is an address, write it with its scheme and port, such as tcp://gpu-box:5556"
        )
    return Login(name, read_connection_file(path))


def login_path(name: str) -> Path:
    """Return the path of a log-in's file.

    Raises:
        ConfigurationError: the name is not valid.
    """
    if not is_login_name(name):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a log-in: use at most 64 letters, digits, `.`, `_` and `-`, and begin with a "
            "letter or a digit"
        )
    return configuration_directory() / "servers" / f"{name}{_SUFFIX}"


def login_names() -> list[str]:
    """Return the names of all log-ins."""
    paths = (configuration_directory() / "servers").glob(f"*{_SUFFIX}")
    return sorted(path.name.removesuffix(_SUFFIX) for path in paths if is_login_name(path.name.removesuffix(_SUFFIX)))
