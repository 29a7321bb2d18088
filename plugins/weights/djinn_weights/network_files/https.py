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

TIMEOUT: Final = 30.0  # in seconds without a received byte
MIN_BYTES_PER_SECOND: Final = 50_000  # a read from a slower server fails
ATTEMPTS: Final = 4  # maximum attempts at a request that fails because of the network or the server
_FIRST_DELAY: Final = 0.25  # seconds before the second attempt
_MAX_IDLE: Final = 16  # number of idle connections to keep
_REDIRECTS: Final = 5
_MAX_FILES: Final = 4096
_INDEX: Final = ".index.json"
_INDEX_LIMIT: Final = 64 << 20
_READ: Final = 1 << 20  # bytes per read
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_SHARD: Final = re.compile(r"(?!\.{1,2}$)[\w.-]+", re.ASCII)  # a file name, not `.` or `..`
_RETRY_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_REDIRECT_STATUSES: Final = frozenset({301, 302, 303, 307, 308})


class _TransientError(OSError):
    """A response error that a retry may fix."""


_TRANSIENT: Final = (_TransientError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLEOFError)


class Connections:
    """Pool of connections to web servers. Thread-safe."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._idle: list[tuple[str, http.client.HTTPSConnection]] = []
        self._lock = threading.Lock()

    def acquire(self, host: str) -> http.client.HTTPSConnection:
        """Take an idle connection to `host` out of the pool, or open a new connection. `host` may include a port."""
        with self._lock:
            for index, (name, connection) in enumerate(self._idle):
                if name == host:
                    del self._idle[index]
                    return connection
            if self._context is None:
                self._context = ssl.create_default_context()
        parts = urlsplit(f"https://{host}")
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIMEOUT, context=self._context)

    def release(self, host: str, connection: http.client.HTTPSConnection) -> None:
        """Put a connection back into the pool after its response was read completely."""
        with self._lock:
            self._idle.append((host, connection))
            surplus = self._idle[:-_MAX_IDLE]
            del self._idle[:-_MAX_IDLE]
        for _, idle in surplus:
            idle.close()

    def __del__(self) -> None:
        for _, idle in self._idle:
            idle.close()


class HttpsFile(WeightFile):
    """A file on a web server, as a weight file. Entity tag, date and size must be equal in all responses."""

    def __init__(self, address: str, permissions: WeightPermissions, connections: Connections, pieces: Pieces) -> None:
        """Read the first byte of a file at a permitted address, and its metadata.

        Raises:
            OSError: the web server does not answer or does not support range requests.
        """
        self._address = self._current_address = address  # the address after redirects
        self._permissions = permissions
        self._connections = connections
        self._pieces = pieces
        self._has_changed = False
        self._metadata = ""
        self.name = urlsplit(address).path.rpartition("/")[2]
        self.size = -1
        first = bytearray(1)
        self._range(0, memoryview(first))

    def version(self) -> str:
        """Return the file's entity tag, date and size as text. Once a read finds a changed file, the text differs."""
        return f"{self._metadata} {'changed' if self._has_changed else self.size}"

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the contents from byte `start` on."""
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
                self._current_address = self._address  # the redirect's target may have expired
                time.sleep(_FIRST_DELAY * 2**attempt)
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
            self._current_address = self._checked_redirect(urljoin(self._current_address, location))
        raise OSError(f"the web server redirects more than {_REDIRECTS} times")

    def _checked_redirect(self, address: str) -> str:
        """Return `address`, the target of a redirect, after a check that clients may read it."""
        if not _is_safe(address) or not allows(self._permissions, address):
            raise OSError("the web server redirects to an address that clients may not read (--allow-weights)")
        return address

    def _request(self, start: int, buffer: memoryview) -> str:
        """Request the range of bytes that fills `buffer`. Return "" on success, or the target of a redirect."""
        parts = urlsplit(self._current_address)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection = self._connections.acquire(parts.netloc)
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
            self._connections.release(parts.netloc, connection)
        else:
            connection.close()
        return location

    def _read_response(self, response: http.client.HTTPResponse, start: int, buffer: memoryview) -> str:
        if response.status in _REDIRECT_STATUSES:
            return response.headers.get("Location") or "nowhere:"
        if response.status in _RETRY_STATUSES or (response.status >= 400 and self._current_address != self._address):
            raise _TransientError(f"the web server answers {response.status}")
        if response.status != http.client.PARTIAL_CONTENT:
            problem = (
                "does not support range requests" if response.status == http.client.OK else f"answers {response.status}"
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

    def _compare(self, metadata: str, size: int) -> None:
        if self.size < 0:
            self._metadata, self.size = metadata, size
        elif (metadata, size) != (self._metadata, self.size):
            self._has_changed = True
            raise OSError(f"{self.name!r} has changed on the web server: load it again")


class HttpsSource(WeightSource):
    """Read `https://host/path`: a file, or an index and the shards beside it."""

    name = "https"

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        """`context`: TLS context. None trusts the certificate authorities that the machine trusts."""
        self._connections = Connections(context)
        self._pieces = Pieces()

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[str]:
        """Return the address itself, if it is a normalized https address without user name and password."""
        del folders
        if not _is_safe(address):
            raise WeightsUnavailable(
                f"{address!r} has a user name, a password, a fragment, '..' or unusual characters: remove them from the address"
            )
        return [address]

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open the file at an address, or an index and the shards that it names."""
        if not urlsplit(address).path.endswith(permissions.suffixes):
            raise WeightsUnavailable(
                f"{address!r} is not a weight file: its name must end with {' or '.join(permissions.suffixes)}"
            )
        try:
            file = self._open(address, permissions)
            if not urlsplit(address).path.endswith(_INDEX):
                return [file]
            addresses = [urljoin(address, name) for name in _shards(file)]
            if not all(allows(permissions, shard_address) and _is_safe(shard_address) for shard_address in addresses):
                raise WeightsUnavailable(
                    f"the index {address!r} names shards at addresses that clients may not read (--allow-weights)"
                )
            return [file, *(self._open(shard_address, permissions) for shard_address in addresses)]
        except OSError as error:
            raise WeightsUnavailable(f"{address!r} cannot be read: {error.strerror or error}") from error

    def _open(self, address: str, permissions: WeightPermissions) -> HttpsFile:
        return HttpsFile(address, permissions, self._connections, self._pieces)


def _is_safe(address: str) -> bool:
    """Return True if an address is an ASCII https address with a host, and without user, fragment, `.` or `..`."""
    try:
        parts = urlsplit(address)
        is_plain = address.isascii() and address.isprintable() and " " not in address and "\\" not in address
        has_host = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    path = unquote(parts.path).split("/")
    return is_plain and has_host and "@" not in parts.netloc and "#" not in address and not {"..", "."} & set(path)


def _shards(index: HttpsFile) -> list[str]:
    """Return the names of the shards in an index.

    Raises:
        WeightsUnavailable: the file is not an index, or a shard is not in the folder of the index.
    """
    if index.size > _INDEX_LIMIT:
        raise WeightsUnavailable(f"the index {index.name!r} has {index.size:,} bytes; the limit is {_INDEX_LIMIT:,}")
    data = bytearray(index.size)
    index.read_into(0, memoryview(data))
    try:
        names = sorted({str(name) for name in json.loads(data)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsUnavailable(f"{index.name!r} is not an index of shards") from None
    if len(names) > _MAX_FILES or not all(_SHARD.fullmatch(name) for name in names):
        raise WeightsUnavailable(f"the index {index.name!r} has over {_MAX_FILES:,} shards, or one outside its folder")
    return names


def _fill(response: http.client.HTTPResponse, buffer: memoryview) -> None:
    """Read the response into `buffer`.

    Raises:
        OSError: the response is too short, too long or too slow.
    """
    deadline = time.monotonic() + TIMEOUT + len(buffer) / MIN_BYTES_PER_SECOND
    offset = 0
    while offset < len(buffer):
        data = response.read1(min(_READ, len(buffer) - offset))
        if not data:
            raise _TransientError("the file ends early")
        buffer[offset : offset + len(data)] = data
        offset += len(data)
        if time.monotonic() > deadline:
            raise OSError("the web server sends too slowly; try again, or download the file first")
    if response.length or (response.length is None and response.read1(1)):
        raise OSError("the web server sent more than was requested")
