"""Local files about servers that `djinn connect` set up. A token is stored only in the log-in."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import Final, TypeVar

import click
import msgspec
import platformdirs

from djinn_commands.connect.ssh import Destination

_MAX_SOCKET_PATH: Final = 84  # maximum bytes of a socket path, minus the suffix that ssh appends before it binds
_SUFFIX: Final = ".json"
T = TypeVar("T")


class Record(msgspec.Struct, frozen=True):
    """A server that `djinn connect` set up or is about to set up.

    Attributes:
        name: name of the server and its log-in.
        host: the destination for ssh, such as `alice@gpu-box`.
        options: options for ssh, such as `-p 2222`.
        folder: Djinn's remote folder. If it is empty, scripts use the user's data directory.
        environment: the user's remote environment with Djinn. If it is empty, scripts use the environment that Djinn creates.
        local: local port of the tunnel, or 0 before the first tunnel.
        remote: remote port of the tunnel, or 0 before the first tunnel.
        login: path of the log-in, or empty before the first log-in.
    """

    name: str
    host: str
    options: tuple[str, ...] = ()
    folder: str = ""
    environment: str = ""
    local: int = 0
    remote: int = 0
    login: str = ""

    @property
    def destination(self) -> Destination:
        """Return the destination for ssh."""
        return Destination(self.host, self.options)

    @property
    def script_variables(self) -> dict[str, str]:
        """Return the shell variables that every script needs."""
        return {"folder": self.folder, "environment": self.environment}


class TunnelState(msgspec.Struct, frozen=True):
    """The state of a tunnel, as reported by its keeper.

    Attributes:
        process: process id of the keeper.
        local: local port of the tunnel.
        remote: remote port of the tunnel.
        is_open: True if the tunnel is open.
        reason: why the tunnel is not open.
        ended: True if the keeper has given up.
    """

    process: int
    local: int = 0
    remote: int = 0
    is_open: bool = False
    reason: str = ""
    ended: bool = False


def records_directory() -> Path:
    """Create the directory of the records, readable by the user only, and return its path."""
    path = platformdirs.user_state_path("djinn") / "connect"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def record_path(name: str, suffix: str = _SUFFIX) -> Path:
    """Return the path of the file with this suffix about the server `name`: by default, its record."""
    return records_directory() / f"{name}{suffix}"


def is_server_name(text: str) -> bool:
    """Return True if `text` can be the name of a server and its log-in."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) is not None


def forget_record(name: str) -> None:
    """Remove all local files about a server except its log-in."""
    for suffix in (_SUFFIX, ".tunnel", ".keeper.log", ".lock", ".connect.lock"):
        record_path(name, suffix).unlink(missing_ok=True)


def find_record(name: str) -> Record | None:
    """Return the record of the server `name`, or None if it is missing or unreadable."""
    return _read_json(record_path(name), Record)


def list_records() -> list[Record]:
    """Return all records, sorted by name."""
    names = sorted(path.name.removesuffix(_SUFFIX) for path in records_directory().glob(f"*{_SUFFIX}"))
    return [record for name in names if (record := find_record(name))]


def save_record(record: Record) -> None:
    """Write a record atomically. It replaces the previous record of the server."""
    _write(record_path(record.name), record)


def tunnel_state(name: str) -> TunnelState | None:
    """Return the state that the keeper of the server `name` wrote last, or None if it wrote none."""
    return _read_json(record_path(name, ".tunnel"), TunnelState)


def save_tunnel_state(name: str, state: TunnelState) -> None:
    """Write the state of the tunnel to the server `name` atomically."""
    _write(record_path(name, ".tunnel"), state)


def control_path(name: str) -> Path:
    """Return the path of the control socket of ssh for the server `name`, in a private directory with a short path.

    Raises:
        PermissionError: other users can access the directory.
    """
    short = hashlib.sha256(os.fsencode(record_path(name))).hexdigest()[:12]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for base in (Path(runtime) / "djinn" if runtime else None, records_directory()):
        if base is not None and len(os.fsencode(base)) + len(short) < _MAX_SOCKET_PATH:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            return base / short
    base = Path(tempfile.gettempdir(), f"djinn-ssh-{user_id()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != user_id() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            f"other users can access {base}, the folder for ssh's sockets: remove it, or set XDG_RUNTIME_DIR to a private folder"
        )
    return base / short


def refuse_windows() -> None:
    """Raise `click.ClickException` on Windows, where ssh cannot share a connection."""
    if sys.platform == "win32":
        raise click.ClickException(
            "this command needs shared ssh connections, which ssh on Windows does not have: run it in WSL (`wsl --install`), or start `djinn serve` "
            "on the remote machine by hand and use `djinn login`"
        )


def user_id() -> int:
    """Return the user id of this process. On Windows, where these commands are refused, return 0."""
    if sys.platform == "win32":
        return 0
    else:  # noqa: RET505 - mypy looks at one platform at a time
        return os.getuid()


def _read_json(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write(path: Path, content: msgspec.Struct) -> None:
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    Path(aside).replace(path)
