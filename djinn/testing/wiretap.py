"""Raw sockets for tests of transports: an unauthenticated client, and a relay that counts bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from djinn_core.system.tcp import unix_socket

_PIECE_BYTES = 1 << 18
_NEVER = 1 << 62


def dial(url: str, timeout: float = 60.0) -> socket.socket:
    """Return a plain socket that is connected to a listener.

    A URL `SCHEME:///PATH` names a Unix socket, and a URL with a host names a TCP port.
    """
    parts = urlsplit(url)
    if not parts.netloc:
        sock = unix_socket()
        sock.settimeout(timeout)
        sock.connect(unquote(parts.path))
        return sock
    return socket.create_connection((parts.hostname, parts.port or 0), timeout)


class CountingRelay:
    """Relay between clients and a server, as a context manager. It counts bytes, and can pause connections.

    Attributes:
        url: URL at which clients connect to the relay.
        bytes_up: bytes that were passed on to the server.
        bytes_down: bytes that were passed on to clients.
    """

    def __init__(self, target: str, directory: Path, pause_bytes: int = _NEVER) -> None:
        """Start to listen for clients.

        Args:
            target: URL of the server.
            directory: folder for the relay's own Unix socket, if `target` names one.
            pause_bytes: a connection pauses after this many bytes in one direction, until `resume` is called.
        """
        self._pause_bytes = pause_bytes
        self._resumed = threading.Condition()
        self._resumes = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._target = target
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        parts = urlsplit(target)
        if not parts.netloc:
            path = directory / "relay.sock"
            self._listener = unix_socket()
            self._listener.bind(str(path))
            self._listener.listen()
            self.url = f"{parts.scheme}://{quote(str(path))}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = parts._replace(netloc=f"127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        self._accepting = self._start(self._accept)

    def resume(self) -> None:
        """Resume the connections that are paused now. Connections that pause later need another call."""
        with self._resumed:
            self._resumes += 1
            self._resumed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pause_bytes = _NEVER
        self.resume()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(10)  # from here on no sockets are added
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in [self._listener, *self._sockets]:
            sock.close()

    @property
    def _threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == f"relay {self.url}"]

    def _start(self, run: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, name=f"relay {self.url}", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was shut down
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)  # closed at the end, also where the server cannot be reached
                server = dial(self._target)
                server.settimeout(None)
                self._sockets.append(server)
                self._start(self._pass_on, client, server, True)
                self._start(self._pass_on, server, client, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        bytes_left = self._pause_bytes
        with suppress(OSError):  # one end has closed; the other end is shut down below
            while piece := source.recv(min(bytes_left, _PIECE_BYTES)):
                with self._lock:
                    if up:
                        self.bytes_up += len(piece)
                    else:
                        self.bytes_down += len(piece)
                try:
                    target.sendall(piece)
                except OSError:  # it has closed: its peer must not wait for a reader, and may have more to receive
                    while source.recv(_PIECE_BYTES):
                        pass
                    break
                bytes_left -= len(piece)
                if not bytes_left:
                    bytes_left = self._pause()
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pause(self) -> int:
        with self._resumed:
            resumes = self._resumes
            self._resumed.wait_for(lambda: self._resumes > resumes or self._pause_bytes == _NEVER)
        return self._pause_bytes
