"""The connection file: a server's addresses and token, in a file that only its owner can read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from djinn_core.errors import ConfigurationError
from djinn_core.logs import get_logger
from djinn_core.system.files import mode_of, user_id
from djinn_core.system.shared_files import replace_file

_LARGEST: Final = 1 << 20  # maximum size in bytes
_log = get_logger("djinn.launch")


class ConnectionFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of a connection file, as JSON.

    Attributes:
        fingerprint: fingerprint of the server's certificate, if no authority has signed it.
    """

    urls: tuple[str, ...]
    token: str
    fingerprint: str = ""

    def __repr__(self) -> str:
        return f"ConnectionFile(urls={self.urls}, fingerprint={self.fingerprint!r})"


# Created at import: msgspec crashes if two threads inspect a class for the first time together.
_files: msgspec.json.Decoder[ConnectionFile] = msgspec.json.Decoder(ConnectionFile)


def write_connection_file(path: Path, content: ConnectionFile) -> None:
    """Write the file atomically, with mode 0600.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the connection file {path}: {error.strerror or error}. Choose another path with "
            "--connection-file PATH"
        ) from error


def remove_connection_file(path: Path, content: ConnectionFile) -> None:
    """Remove the file if it still contains `content`. A server that started later may have replaced it."""
    with contextlib.suppress(ConfigurationError, FileNotFoundError):
        if read_connection_file(path) == content:
            path.unlink()


def read_connection_file(path: Path) -> ConnectionFile:
    """Read the connection file.

    Raises:
        ConfigurationError: the file is missing, unreadable or malformed; the message says what to do.
    """
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            raw = file.read(_LARGEST)
        content = _files.decode(raw)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no connection file {path}: start the server with `djinn serve --connection-file {path}`, which "
            "writes it as soon as it is ready, or unset DJINN_CONNECTION_FILE"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the connection file {path}: {error}. It must be JSON with `urls` and `token`, as "
            "`djinn serve --connection-file` writes it"
        ) from error
    return content


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse a file that other users can write, because it decides where programs and data are sent.

    Warn if other users can read it.
    """
    if mode_of(status) & 0o022 or status.st_uid not in {user_id(), 0}:
        raise ConfigurationError(
            f"other users of this machine can write the connection file {path}, and redirect programs and data: "
            f"chmod 600 {path}, or copy it again as a file of your own"
        )
    if mode_of(status) & 0o044:
        _log.warning("other users of this machine can read the connection file: chmod 600 it", path=str(path))
