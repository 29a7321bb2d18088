"""The built-in transport `local`: Unix sockets, for a server on this machine that belongs to the same user."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import msgspec

from djinn_core.errors import TransportError
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.transports import Connection, Limits, Listener, Transport, TransportCapabilities
from djinn_core.protocol.net.sockets import SocketConnection, SocketListener
from djinn_core.system.files import mode_of, user_id
from djinn_core.system.processes import CLIENT_ONLY
from djinn_core.system.tcp import MAX_PATH_BYTES, set_buffer_sizes, unix_socket

djinn_api_version = "2.0"

# The kernel's limit for `sun_path` without the final zero. Unix sockets have no automatic tuning; the kernel caps this
# buffer size.
_BUFFER_BYTES: Final = 4 << 20


class LocalTransport(Transport):
    """The transport over Unix sockets. Its URLs are `unix:///absolute/path.sock`.

    Listening at `unix://` picks a path in a new private directory.
    """

    name = "local"
    schemes = ("unix",)
    capabilities = TransportCapabilities(same_host=True, relayed=False, speed=100)

    def connect(self, url: str, limits: Limits, timeout: float) -> Connection:
        """Connect to a server, within `timeout` seconds."""
        path = _path_of(url)
        sock = _open_socket()
        try:
            sock.settimeout(timeout)
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise TransportError(f"no server answers at {url}: {error}; is it running, as this user?") from error
        return SocketConnection(sock, limits, f"server {url}")

    def listen(self, url: str, limits: Limits, accept: Callable[[Connection], bool | None]) -> Listener:
        """Listen at `url`, and call `accept` for each connection. A stale socket file is replaced.

        Raises:
            TransportError: the path is too long or taken, or other users may write to its directory.
        """
        path = _path_of(url) if urlsplit(url).path else Path(tempfile.mkdtemp(prefix="djinn-")) / "server.sock"
        temporary = path.parent if not urlsplit(url).path else None
        sock = _open_socket()
        try:
            _check_length(path)
            _prepare_directory(path.parent)
            _remove_stale(path)
            sock.bind(str(path))
            # No client can connect in between, because it does not listen yet.
            path.chmod(0o600)
            release = _Release(path, path.stat().st_ino, temporary)
            return SocketListener(sock, f"unix://{quote(str(path))}", limits, accept, release)
        except OSError as error:
            sock.close()
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"cannot listen at {url}: {error}") from error


@hookimpl
def djinn_register_transports() -> Iterable[Transport]:
    """Return the transport `local` if Python has Unix sockets."""
    return [] if CLIENT_ONLY else [LocalTransport()]


class _Release(msgspec.Struct, frozen=True):
    """Remove a listener's socket file, unless another server has replaced it, and its temporary directory."""

    path: Path
    inode: int
    temporary: Path | None

    def __call__(self) -> None:
        if self.path.exists() and self.path.stat().st_ino == self.inode:
            self.path.unlink()
        if self.temporary is not None and self.temporary.exists():
            self.temporary.rmdir()


def _open_socket() -> socket.socket:
    sock = unix_socket()
    set_buffer_sizes(sock, _BUFFER_BYTES)
    return sock


def _path_of(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme != "unix" or parts.netloc or not path.startswith("/"):
        raise TransportError(f"{url!r} is not an address of a Unix socket; write unix:///absolute/path.sock")
    _check_length(Path(path))
    return Path(path)


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise TransportError(
            f"the path of a Unix socket may take {MAX_PATH_BYTES} bytes, {path} takes {length};"
            " choose a shorter one, for instance below $XDG_RUNTIME_DIR"
        )


def _prepare_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    writable_by_others = mode_of(status) & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if writable_by_others or status.st_uid not in (user_id(), 0):
        raise TransportError(
            f"other users can replace files in {directory}; choose a directory of your own (chmod 700) for the socket"
        )


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return
    with unix_socket() as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise TransportError(f"another server listens at {path}; stop it or choose another path")
