"""Local files about servers that are reached over ssh. The token is stored only in the log-in."""

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

_LONGEST: Final = 84  # maximum bytes of a socket path, minus the suffix that ssh appends before it binds
_SUFFIX: Final = ".json"
T = TypeVar("T")


class Record(msgspec.Struct, frozen=True):
    """A server that is connected over ssh.

    Attributes:
        name: name of the server and its log-in.
        host: as in `Destination`.
        options: as in `Destination`.
        folder: Djinn's remote folder; empty: the user's data directory.
        environment: a remote environment of the user that has Djinn; empty: the environment that Djinn created.
        local: the local port of the tunnel.
        remote: the remote port of the tunnel.
        login: the file of the log-in.
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
    def place(self) -> dict[str, str]:
        """Return the variables of every script."""
        return {"folder": self.folder, "environment": self.environment}


class TunnelState(msgspec.Struct, frozen=True):
    """The state of a tunnel, as reported by its keeper.

    Attributes:
        reason: why the tunnel is not open.
    """

    process: int
    local: int = 0
    remote: int = 0
    is_open: bool = False
    reason: str = ""
    ended: bool = False


def records_directory() -> Path:
    """Return the directory of the records, which only the user can read."""
    path = platformdirs.user_state_path("djinn") / "connect"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def record_path(name: str, suffix: str = _SUFFIX) -> Path:
    """Return the path of a server's record. With another suffix, return the path of another file about the server."""
    return records_directory() / f"{name}{suffix}"


def is_server_name(text: str) -> bool:
    """Return True if `text` can be the name of a server and its log-in."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) is not None


def forget_record(name: str) -> None:
    """Remove all local files about a server except its log-in."""
    for suffix in (_SUFFIX, ".tunnel", ".keeper.log", ".lock", ".connect.lock"):
        record_path(name, suffix).unlink(missing_ok=True)


def find_record(name: str) -> Record | None:
    """Return the record with that name; None if it is missing or another version wrote it."""
    return _read(record_path(name), Record)


def list_records() -> list[Record]:
    """Return all records, by name."""
    names = sorted(path.name.removesuffix(_SUFFIX) for path in records_directory().glob(f"*{_SUFFIX}"))
    return [record for name in names if (record := find_record(name))]


def save_record(record: Record) -> None:
    """Replace a record."""
    _write(record_path(record.name), record)


def tunnel_state(name: str) -> TunnelState | None:
    """Return the keeper's last state; None if the keeper wrote no state."""
    return _read(record_path(name, ".tunnel"), TunnelState)


def save_tunnel_state(name: str, state: TunnelState) -> None:
    """Replace the keeper's state."""
    _write(record_path(name, ".tunnel"), state)


def control_path(name: str) -> Path:
    """Return the path of the connection's socket, in a private directory with a short path.

    Raises:
        PermissionError: the directory belongs to another user.
    """
    short = hashlib.sha256(os.fsencode(record_path(name))).hexdigest()[:12]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for base in (Path(runtime) / "djinn" if runtime else None, records_directory()):
        if base is not None and len(os.fsencode(base)) + len(short) < _LONGEST:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            return base / short
    base = Path(tempfile.gettempdir(), f"djinn-ssh-{user_id()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if status.st_uid != user_id() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{base} is not yours alone: remove it, or set XDG_RUNTIME_DIR")
    return base / short


def refuse_windows() -> None:
    """Raise `click.ClickException` on Windows, where ssh cannot share a connection."""
    if sys.platform == "win32":
        raise click.ClickException(
            "on Windows, ssh shares no connections, which this needs: use it in WSL (`wsl --install`), or start `djinn serve` there by hand and "
            "use `djinn login`"
        )


def user_id() -> int:
    """Return this process's user id; 0 on Windows, where the commands are refused."""
    if sys.platform == "win32":
        return 0
    else:  # noqa: RET505 - mypy looks at one platform at a time
        return os.getuid()


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _write(path: Path, content: msgspec.Struct) -> None:
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    Path(aside).replace(path)
