"""The client's end of a channel."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Buffer, Connection, FrameDecoder, Limits, StreamConnection
from djinn_core.system.interrupts import LOOK_SECONDS, interrupt_mask
from djinn_http import dialect
from djinn_http.exchange import Endpoint, HttpExchange
from djinn_http.pulse import keep_alive
from djinn_http.responses import SWITCHED
from djinn_http.upgraded import ASKING, UpgradedConnection

_OK: Final = 200
_CREATED: Final = 201
_NO_CONTENT: Final = 204
_GONE: Final = 410
# Possible replies of a proxy that does not support upgrades.
_NO_UPGRADE: Final = frozenset({400, 426, 500, 501, 502})
# Seconds for the server's reply when the channel is closed.
_LEAVE_SECONDS: Final = 1.0
# Characters of a foreign response to quote in an error.
_SAID_LIMIT: Final = 200
# Seconds that `close` waits for another thread's `send` before it cuts it off.
_PATIENCE_SECONDS: Final = 0.2
# Attempts at a `receive` whose connection broke before the response.
_ATTEMPTS: Final = 3


def connect(endpoint: Endpoint, limits: Limits, timeout: float, peer: str) -> Connection:
    """Return a connection over an upgraded socket if the server and proxies allow it, or else over HTTP requests.

    Args:
        endpoint: address of the server.
        limits: largest frame to accept.
        timeout: seconds for opening the connection.
        peer: name of the server, for messages.

    Raises:
        TransportError: no server answers, or the server is not a Djinn server.
    """
    if endpoint.tls is not None:  # the server handles TLS in its event loop
        return HttpConnection(open_channel(endpoint, limits, timeout, peer), endpoint, limits, timeout, peer)
    channel = open_channel(endpoint, limits, timeout, peer, ASKING)
    if channel.response is None or channel.response.status != SWITCHED:
        return HttpConnection(channel, endpoint, limits, timeout, peer)
    sock, received = channel.give_up_socket()
    assert isinstance(sock, socket.socket)
    connection = UpgradedConnection(sock, limits, peer, channel.bytes_sent, channel.bytes_received, received)
    keep_alive(connection)
    return connection


def open_channel(endpoint: Endpoint, limits: Limits, timeout: float, peer: str, asking: str = "") -> HttpExchange:
    """Ask the server for a channel, and return the HTTP connection with its response.

    `asking`: headers that request an upgrade to a plain socket. All other arguments are as in `connect`.

    Raises:
        TransportError: no server answers, or the server is not a Djinn server.
    """
    exchange = HttpExchange(endpoint, FrameDecoder(limits), timeout)
    deadline = time.monotonic() + timeout
    try:
        exchange.request(dialect.OPEN, asking)
        if not exchange.read(deadline):
            raise TimeoutError(f"no response in {timeout} s")
    except (OSError, ProtocolError) as error:
        exchange.reopen()
        raise TransportError(f"no Djinn server answers at {peer.removeprefix('server ')}: {error}") from error
    response = exchange.response
    if response is not None and (response.status == SWITCHED or response.header(dialect.CHANNEL)):
        return exchange
    description = _describe(exchange)
    exchange.reopen()
    if asking and response is not None and response.status in _NO_UPGRADE:
        return open_channel(endpoint, limits, timeout, peer)
    raise TransportError(f"no Djinn server answers at {peer.removeprefix('server ')}: {description}")


class HttpConnection(StreamConnection):
    """A `Connection` over HTTP requests. It has no thread: the calling threads send requests and read responses."""

    def __init__(self, opened: HttpExchange, endpoint: Endpoint, limits: Limits, timeout: float, peer: str) -> None:
        """`opened`: result of `open_channel`, with the response that names the channel."""
        super().__init__(limits, peer)
        further = [HttpExchange(endpoint, FrameDecoder(limits), timeout) for _ in range(1, dialect.PARALLEL_SENDS)]
        self._sends = [opened, *further]
        self._receive = HttpExchange(endpoint, self._decoder, timeout)
        self._sent_pieces = 0
        self._answered = 0
        self._failures = 0
        self._asked = False
        self._deserted = False  # True if the server could not be told about the end
        self._channel = opened.response.header(dialect.CHANNEL) if opened.response is not None else ""
        self._ask()
        keep_alive(self)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent, including HTTP headers."""
        return self._receive.bytes_sent + sum(exchange.bytes_sent for exchange in self._sends)

    @property
    def bytes_received(self) -> int:
        """Return the bytes received, including HTTP headers and unread responses to sends."""
        self._collect_responses()
        return self._receive.bytes_received + sum(exchange.bytes_received for exchange in self._sends)

    def close(self) -> None:
        """Close the channel. The server receives all earlier frames first."""
        self._say_goodbye()
        super().close()

    def pulse(self) -> None:
        """Send a `receive` request if none waits at the server. Never blocks."""
        self.take_in()

    # --- opening, sending, closing --------------------------------------------------------------------------

    def _write(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        remaining = list(pieces(buffers, dialect.PIECE_BYTES))
        for count, piece in enumerate(remaining):
            if not self._send_piece(piece):
                return [buffer for piece in remaining[count:] for buffer in piece]
        return ()

    def _send_piece(self, piece: Sequence[Buffer]) -> bool:
        """Send a piece. Return False if an interrupt is pending while an earlier piece is unanswered."""
        exchange = self._sends[self._sent_pieces % len(self._sends)]
        if not self._settle(exchange):
            return False
        try:
            exchange.request(dialect.SEND, self._headers(self._sent_pieces), piece)
        except OSError as error:
            raise TransportError(_last_words(exchange) or str(error)) from error
        self._sent_pieces += 1
        return True

    def _settle(self, exchange: HttpExchange) -> bool:
        """Wait for the response to the last request on `exchange`. Return False if an interrupt is pending first.

        Raises:
            TransportError: the response is an error.
        """
        while not exchange.read(time.monotonic() + LOOK_SECONDS):
            if interrupt_mask.pending:
                return False
        response = exchange.response
        if response is not None and response.status not in {_NO_CONTENT, _CREATED}:
            raise TransportError(_describe(exchange))
        return True

    def _collect_responses(self) -> None:
        """Read the responses to `send` requests that have arrived. Never blocks. The next `send` raises the errors."""
        if self._end_reason or not self._send_lock.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            for exchange in self._sends:
                exchange.read(now)
        except (OSError, ProtocolError):
            return
        finally:
            self._send_lock.release()

    def _say_goodbye(self) -> None:
        """Send a `close` request after all frames, because the server cannot detect a disconnect."""
        if self._end_reason or self._send_closed or self._process != os.getpid():
            return
        if not self._send_lock.acquire(timeout=_PATIENCE_SECONDS):
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        try:
            if all(exchange.read(deadline) for exchange in self._sends):
                self._sends[0].request(dialect.CLOSE, self._headers(self._sent_pieces))
                self._sends[0].read(deadline)
        except (OSError, ProtocolError):
            return  # the channel has ended in any case
        finally:
            self._send_lock.release()

    def _hang_up(self) -> None:
        """Send a `close` request now, and drop frames that were not sent. Frames of the server can still be fetched."""
        exchange = self._sends[0]
        exchange.reopen()
        try:
            exchange.request(dialect.CLOSE, self._headers(0))
            self._deserted = not exchange.read(time.monotonic() + _LEAVE_SECONDS)
        except (OSError, ProtocolError):
            self._deserted = True

    def _shut_down(self) -> None:
        for exchange in (*self._sends, self._receive):
            exchange.shut_down()

    def _drop(self) -> None:
        """Close the sockets. The next request opens new ones."""
        for exchange in (*self._sends, self._receive):
            exchange.reopen()

    # --- receiving ------------------------------------------------------------------------------------------

    @property
    def _torn(self) -> bool:
        return self._receive.torn

    def _ask(self) -> None:
        if self._deserted:
            raise TransportError(f"{self.peer} cannot be reached any more")
        self._receive.request(dialect.RECEIVE, self._headers(self._answered))
        self._asked = True

    def _receive_some(self, deadline: float | None) -> bool:
        try:
            if not self._asked:
                self._ask()
            came = self._receive.read_some(deadline)
        except ProtocolError:
            self._say_goodbye()
            raise
        except OSError as error:
            self._ask_again(error)
            return True
        if self._receive.response is not None and self._receive.response.complete:
            self._take_response(self._receive.response.status)
        return came

    def _take_response(self, status: int) -> None:
        self._failures = 0
        if status == _OK:
            self._answered += 1
        elif status == _GONE:
            raise TransportError("the peer closed the connection")
        elif status != _NO_CONTENT:
            raise TransportError(_describe(self._receive))
        self._asked = False
        with suppress(OSError):  # received frames are delivered first; the next call retries
            self._ask()

    def _ask_again(self, error: OSError) -> None:
        """Repeat a `receive` request whose connection broke.

        Raise `error` if the response had begun, this connection was closed, or too many attempts failed.
        """
        response = self._receive.response
        self._failures += 1
        begun = response is not None and response.begun
        if self._end_reason or self._deserted or begun or self._failures >= _ATTEMPTS:
            raise error
        self._receive.reopen()
        self._ask()

    def _headers(self, sequence: int) -> str:
        return f"{dialect.CHANNEL}: {self._channel}\r\n{dialect.SEQUENCE}: {sequence}\r\n"


def pieces(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """Split `buffers`, without copying, into lists of at most `size` bytes."""
    piece: list[Buffer] = []
    room = size
    for buffer in buffers:
        remaining = memoryview(buffer)
        while remaining:
            piece.append(remaining[:room])
            remaining, room = remaining[room:], room - min(room, len(remaining))
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _describe(exchange: HttpExchange) -> str:
    response = exchange.response
    if response is None:
        return "the server sent no response"
    message = " ".join(response.text.split())[:_SAID_LIMIT]
    # An HTML error page adds nothing to its status.
    return f"the response was HTTP {response.status}" + (
        f": {message}" if message and not message.startswith("<") else ""
    )


def _last_words(exchange: HttpExchange) -> str:
    """Return a description of the response that the server sent before it closed the connection, or an empty string."""
    try:
        return _describe(exchange) if exchange.read(time.monotonic() + _LEAVE_SECONDS) else ""
    except (OSError, ProtocolError):
        return ""
