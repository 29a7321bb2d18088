"""A bad network: a relay between client and server that loses frames, breaks connections and stalls."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

_PREFIX_OF_NOTES = 9
_PREFIX = struct.Struct("<4sHHIIQ")

# fates of the n-th frame (from 1) over all connections in one direction
PASS, LOSE, BREAK, HALF, GARBLE = "pass", "lose", "break", "half", "garble"
Fate = Callable[[int], str]


def all_pass(_: int) -> str:
    """Return `PASS` for each frame, as a good network does."""
    return PASS


class BadNetwork:
    """A relay between a client and a server, for connections over TCP.

    Attributes:
        up, down: functions that choose the fate of frames to and from the server. They may be replaced at any time.
        sent: bytes that clients have sent, including lost bytes.
        connections: number of connections so far.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.framed = parts.scheme == "tcp"
        self.url = f"{parts.scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.up: Fate = all_pass
        self.down: Fate = all_pass
        self.sent = 0
        self.connections = 0
        self._counts = {"up": 0, "down": 0}
        self._lock = threading.Lock()
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def part(self, seconds: float) -> None:
        """Stall connections for `seconds` without breaking them. Return at once."""
        self._passing.clear()
        threading.Timer(seconds, self._passing.set).start()

    def break_all(self) -> None:
        """Break every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for item in sockets:
            _reset(item)

    def close(self) -> None:
        """Break every connection, and refuse new connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            with self._lock:
                self._sockets += [client, server]
                self.connections += 1
            for source, target, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._pass_on, args=(source, target, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError, EOFError):
            while not self.framed:
                target.sendall(self._some(source, way))
            while True:
                prefix = self._read(source, _PREFIX.size, way)
                _, _, _, head, buffers, body = _PREFIX.unpack(prefix)
                self._pass_frame(source, target, way, prefix, head + 8 * buffers + body)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pass_frame(self, source: socket.socket, target: socket.socket, way: str, prefix: bytes, rest: int) -> None:
        with self._lock:
            self._counts[way] += (
                rest > _PREFIX_OF_NOTES
            )  # notes always pass: a lost note is like the loss of the next frame
            fate = (self.up if way == "up" else self.down)(self._counts[way]) if rest > _PREFIX_OF_NOTES else PASS
        if fate == BREAK:
            self._end(source, target)
        if fate != LOSE:
            target.sendall(prefix if fate != GARBLE else b"no frame" + prefix[8:])
        limit = rest // 2 if fate == HALF else rest
        while limit:
            data = self._read(source, min(limit, 1 << 16), way)
            limit -= len(data)
            if fate != LOSE:
                target.sendall(data)
        if fate == HALF:
            self._end(source, target)

    def _read(self, source: socket.socket, size: int, way: str) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self._some(source, way, size - len(data))
        return bytes(data)

    def _some(self, source: socket.socket, way: str, limit: int = 1 << 16) -> bytes:
        data = source.recv(limit)
        if not data:
            raise EOFError
        self._passing.wait()
        self.sent += len(data) if way == "up" else 0
        return data

    def _end(self, *ends: socket.socket) -> None:
        for end in ends:
            _reset(end)
        raise EOFError


def _reset(one: socket.socket) -> None:
    """Reset a connection, as a router that has lost its state does. Data in flight is lost."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    time.sleep(0)
    one.close()
