"""State folder of a server: the files from which a restarted server continues its sessions."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.system.directories import cache_directory, state_directory
from djinn_core.system.files import CLOEXEC, NOFOLLOW, user_id
from djinn_core.system.processes import lock_file
from djinn_core.system.shared_files import replace_file
from djinn_server.launch.listen_addresses import ListenAddresses
from djinn_server.launch.own_journals import OwnJournals
from djinn_server.system.private_files import check_private_folder, open_private

_LOCK: Final = "lock"
_TOKEN: Final = "token"
_SHORT: Final = 64  # bytes that are read of a file with a process id


@attrs.frozen
class ServerState:
    """A locked state folder.

    Attributes:
        folder: the folder. It has the subfolders `journals` and `accounts`, the file `token` and, unless the operator names another
            file, `connection.json`.
        lasting: True if a server that restarts with the same arguments has the same folder and ports.
    """

    folder: Path
    lasting: bool
    _close: Callable[[], None] = attrs.field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def open_state(chosen: Path | None, addresses: ListenAddresses, warn: Callable[[str], None]) -> ServerState:
    """Create and lock the state folder of a server.

    Args:
        chosen: the operator's folder; None: a folder for the fixed port, or a temporary folder without a fixed port.
        addresses: addresses at which the server listens.
        warn: called with a message if sessions will end when the server restarts.

    Raises:
        ConfigurationError: another server has locked the folder, other users can enter it, or it cannot be created.
    """
    fixed_address = addresses.fixed()
    if chosen is None and not fixed_address:
        return _temporary()
    folder = chosen or state_directory() / "servers" / fixed_address
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if chosen is not None:
            raise ConfigurationError(f"cannot create the state folder {folder}: {error}") from error
        warn(
            f"Sessions will end when this server restarts: cannot create its state folder ({error}). Name another with --state-dir"
        )
        return _temporary()
    try:
        check_private_folder(folder)
        lock = _lock(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot use the state folder {folder}: {error}") from error
    return ServerState(folder.resolve(), bool(fixed_address), lambda: os.close(lock))


def _lock(folder: Path) -> int:
    """Lock a state folder, and return the locked file descriptor. The lock ends with the process."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | NOFOLLOW | CLOEXEC, 0o600)
    try:
        lock_file(lock)
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except BlockingIOError as error:
        owner = os.read(lock, _SHORT).decode(errors="replace")
        os.close(lock)
        raise ConfigurationError(
            f"another `djinn serve`, process {owner or 'unknown'}, uses the state folder {folder}: stop it, or choose another folder "
            "with --state-dir"
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _temporary() -> ServerState:
    """Create and return a temporary state folder.

    This process removes it. If the process is killed, the next server removes it.

    Raises:
        ConfigurationError: no folder can be created.
    """
    try:
        journals = OwnJournals(cache_directory() / "servers")
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"djinn-servers-{user_id()}"
        try:
            journals = OwnJournals(folder)
        except OSError as error:
            raise ConfigurationError(
                f"cannot create a temporary state folder in {folder}: {error}. Name another folder with --state-dir"
            ) from error
    return ServerState(journals.path, False, journals.close)


def stored_token(folder: Path) -> str:
    """Return the token in the state folder, or create one.

    Raises:
        ConfigurationError: the file is a link, belongs to another user, can be read by others, or cannot be written.
    """
    path = folder / _TOKEN
    try:
        with contextlib.suppress(FileNotFoundError), open_private(path) as file:
            return file.read(4 * _SHORT).decode("ascii")
        token = secrets.token_urlsafe(32)
        replace_file(path, token.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot use {path}: {error}. Remove it to get a new token") from error
    return token
