"""The weight source `https:`: read ranges of files on web servers."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightFile, WeightPermissions, WeightSource
from djinn_server.weights.permissions import allows
from djinn_weights.network_files.pieces import Pieces

PATIENCE: Final = 30.0  # timeout in seconds without a received byte
SLOWEST: Final = 50_000  # minimum rate in bytes per second; slower servers are given up
ATTEMPTS: Final = 4  # attempts at a request that fails because of the network or the server
_FIRST_WAIT: Final = 0.25  # seconds before the second attempt
_IDLE: Final = 16  # number of idle connections to keep
_REDIRECTS: Final = 5
_MOST_FILES: Final = 4096
_INDEX: Final = ".index.json"
_INDEX_LIMIT: Final = 64 << 20
_READ: Final = 1 << 20  # bytes per read
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SHARD: Final = re.compile(r"(?!\.{1,2}$)[\w.-]+", re.ASCII)  # a file name, not `.` or `..`
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})
_MOVED: Final = frozenset({301, 302, 303, 307, 308})


class _TransientError(OSError):
    """A response error that a retry may fix."""


_TRANSIENT: Final = (_TransientError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLEOFError)


class Connections:
    """Pool of connections to web servers. Thread-safe."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._idle: list[tuple[str, http.client.HTTPSConnection]] = []
        self._lock = threading.Lock()

    def take(self, host: str) -> http.client.HTTPSConnection:
        """Return an idle or a new connection to `host`, which may include a port."""
        with self._lock:
            for place, (name, connection) in enumerate(self._idle):
                if name == host:
                    del self._idle[place]
                    return connection
            if self._context is None:
                self._context = ssl.create_default_context()
        parts = urlsplit(f"https://{host}")
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=PATIENCE, context=self._context)

    def give(self, host: str, connection: http.client.HTTPSConnection) -> None:
        """Return a connection to the pool after its response was read completely."""
        with self._lock:
            self._idle.append((host, connection))
            surplus = self._idle[:-_IDLE]
            del self._idle[:-_IDLE]
        for _, idle in surplus:
            idle.close()

    def __del__(self) -> None:
        for _, idle in self._idle:
            idle.close()


class HttpsFile(WeightFile):
    """A file on a web server, as a weight file. Its metadata must be equal in all responses."""

    def __init__(self, address: str, permissions: WeightPermissions, connections: Connections, pieces: Pieces) -> None:
        """Open a file.

        Raises:
            OSError: the server does not support ranges of the file.
        """
        self._address = self._place = address  # the address after redirects
        self._permissions = permissions
        self._connections = connections
        self._pieces = pieces
        self._changed = False
        self._said = ""
        self.name = urlsplit(address).path.rpartition("/")[2]
        self.size = -1
        first = bytearray(1)
        self._range(0, memoryview(first))

    def version(self) -> str:
        """Return the entity tag, date and size in the responses."""
        return f"{self._said} {'changed' if self._changed else self.size}"

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents from byte `start` on."""
        if start + len(buffer) > self.size:
            raise OSError(f"{self.name!r} ends before byte {start + len(buffer)}")
        self._pieces.read(start, buffer, self._range)

    def _range(self, start: int, buffer: memoryview) -> None:
        if not buffer:
            return
        for attempt in range(ATTEMPTS - 1):
            try:
                self._follow(start, buffer)
            except _TRANSIENT:
                self._place = self._address  # the redirect's target may have expired
                time.sleep(_FIRST_WAIT * 2**attempt)
            else:
                return
        try:
            self._follow(start, buffer)
        except _TRANSIENT as error:
            raise OSError(f"the web server does not answer ({str(error) or type(error).__name__})") from error

    def _follow(self, start: int, buffer: memoryview) -> None:
        for _ in range(_REDIRECTS):
            location = self._request(start, buffer)
            if not location:
                return
            self._place = self._permitted(urljoin(self._place, location))
        raise OSError("the web server redirects too often")

    def _permitted(self, address: str) -> str:
        """Return the target of a redirect after a check that clients may read it."""
        if not _is_safe(address) or not allows(self._permissions, address):
            raise OSError("the web server redirects to an address that clients may not read (--allow-weights)")
        return address

    def _request(self, start: int, buffer: memoryview) -> str:
        """Request a range. Return "" on success, or the address of a redirect."""
        parts = urlsplit(self._place)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection = self._connections.take(parts.netloc)
        try:
            last = start + len(buffer) - 1
            connection.request("GET", target, headers={"Range": f"bytes={start}-{last}", "Accept-Encoding": "identity"})
            with connection.getresponse() as response:
                location = self._read_response(response, start, buffer)
                is_empty = not location and response.length == 0
        except BaseException:
            connection.close()
            raise
        if is_empty and not response.will_close:
            self._connections.give(parts.netloc, connection)
        else:
            connection.close()
        return location

    def _read_response(self, response: http.client.HTTPResponse, start: int, buffer: memoryview) -> str:
        if response.status in _MOVED:
            return response.headers.get("Location") or "nowhere:"
        if response.status in _BUSY or (response.status >= 400 and self._place != self._address):
            raise _TransientError(f"the web server answers {response.status}")
        if response.status != http.client.PARTIAL_CONTENT:
            problem = (
                "does not read ranges of it" if response.status == http.client.OK else f"answers {response.status}"
            )
            raise OSError(f"the web server {problem}")
        content_range = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if content_range is None or (int(content_range[1]), int(content_range[2])) != (start, start + len(buffer) - 1):
            raise OSError("the web server did not return the requested range")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise OSError("the web server returned compressed data")
        self._compare(
            f"{response.headers.get('ETag', '')} {response.headers.get('Last-Modified', '')}", int(content_range[3])
        )
        _fill(response, buffer)
        return ""

    def _compare(self, said: str, size: int) -> None:
        if self.size < 0:
            self._said, self.size = said, size
        elif (said, size) != (self._said, self.size):
            self._changed = True
            raise OSError(f"{self.name!r} has changed")


class HttpsSource(WeightSource):
    """Read `https://host/path`: a file, or an index and the shards beside it."""

    name = "https"

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """`context`: TLS context; None: trust the authorities that the machine trusts."""
        self._connections = Connections(context)
        self._pieces = Pieces()

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[str]:
        """Return candidate places of an address, in the order to try them."""
        del folders
        if not _is_safe(address):
            raise WeightsUnavailable(
                f"{address!r} contains a user name, a password or an unusual spelling: remove these from the address"
            )
        return [address]

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open a network address. Return its weight files."""
        if not urlsplit(address).path.endswith(permissions.suffixes):
            raise WeightsUnavailable(f"{address!r} is not a file with weights ({', '.join(permissions.suffixes)})")
        try:
            file = self._open(address, permissions)
            if not urlsplit(address).path.endswith(_INDEX):
                return [file]
            places = [urljoin(address, name) for name in _shards(file)]
            if not all(allows(permissions, place) and _is_safe(place) for place in places):
                raise WeightsUnavailable(f"shards of {address!r} are at addresses that clients may not read")
            return [file, *(self._open(place, permissions) for place in places)]
        except OSError as error:
            raise WeightsUnavailable(f"{address!r} cannot be read: {error.strerror or error}") from error

    def _open(self, address: str, permissions: WeightPermissions) -> HttpsFile:
        return HttpsFile(address, permissions, self._connections, self._pieces)


def _is_safe(address: str) -> bool:
    """Return True if an address is a normalized https address without user, fragment or `..`."""
    try:
        parts = urlsplit(address)
        is_plain = address.isascii() and address.isprintable() and " " not in address and "\\" not in address
        is_named = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    path = unquote(parts.path).split("/")
    return is_plain and is_named and "@" not in parts.netloc and "#" not in address and not {"..", "."} & set(path)


def _shards(index: HttpsFile) -> list[str]:
    """Return the file names in an index of shards.

    Raises:
        WeightsUnavailable: the file is not an index, or a name is not a file beside it.
    """
    if index.size > _INDEX_LIMIT:
        raise WeightsUnavailable(f"the index {index.name!r} is too long")
    data = bytearray(index.size)
    index.read_into(0, memoryview(data))
    try:
        names = sorted({str(name) for name in json.loads(data)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsUnavailable(f"{index.name!r} is not an index of shards") from None
    if len(names) > _MOST_FILES or not all(_SHARD.fullmatch(name) for name in names):
        raise WeightsUnavailable(f"the index {index.name!r} names a shard that is not next to the index")
    return names


def _fill(response: http.client.HTTPResponse, buffer: memoryview) -> None:
    """Read until the buffer is full.

    Raises:
        OSError: the response is too short or too slow.
    """
    until = time.monotonic() + PATIENCE + len(buffer) / SLOWEST
    at = 0
    while at < len(buffer):
        data = response.read1(min(_READ, len(buffer) - at))
        if not data:
            raise _TransientError("the file ends early")
        buffer[at : at + len(data)] = data
        at += len(data)
        if time.monotonic() > until:
            raise OSError("the web server sends too slowly; try again, or download the file first")
    if response.length or (response.length is None and response.read1(1)):
        raise OSError("the web server sent more than was requested")
