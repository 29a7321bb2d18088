"""The client's end of a channel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from djinn.transports import Buffer, Frame, FrameDecoder, Limits, ProtocolError, TransportError, encode_frame
from djinn_http import dialect
from djinn_http.exchange import Endpoint, Exchange
from djinn_http.pulse import keep_alive

_OK: Final = 200
_CREATED: Final = 201
_NO_CONTENT: Final = 204
_GONE: Final = 410
_LEAVE_SECONDS: Final = 1.0
# Characters of what a stranger answered that go into an error.
_SAID_LIMIT: Final = 200
# How long `close` waits for another thread's `send` before it cuts it off.
_PATIENCE_SECONDS: Final = 0.2
# Attempts at a `receive` whose connection broke before an answer came.
_ATTEMPTS: Final = 3


class HttpConnection:
    """A `Connection` made of HTTP requests. It has no thread of its own: whoever calls does the work.

    Attributes:
        peer: who is at the other end, for messages.
    """

    def __init__(self, endpoint: Endpoint, limits: Limits, timeout: float, peer: str) -> None:
        """Open a channel.

        Raises:
            TransportError: nobody answers, or not a Djinn server.
        """
        self.peer = peer
        self._decoder = FrameDecoder(limits)
        self._sends = [Exchange(endpoint, FrameDecoder(limits), timeout) for _ in range(dialect.PARALLEL_SENDS)]
        self._receive = Exchange(endpoint, self._decoder, timeout)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._process = os.getpid()
        self._sent = 0
        self._answered = 0
        self._failures = 0
        self._ended = ""
        self._channel = self._open(timeout)
        self._ask()
        keep_alive(self)

    @property
    def limits(self) -> Limits:
        """What a frame may weigh, in both directions."""
        return self._decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._decoder.limits = limits

    @property
    def bytes_sent(self) -> int:
        """Bytes put on the wire, HTTP's own included."""
        return self._receive.bytes_sent + sum(exchange.bytes_sent for exchange in self._sends)

    @property
    def bytes_received(self) -> int:
        """Bytes taken off the wire, HTTP's own included, and with them answers to sends that nobody has looked at yet."""
        self._collect_answers()
        return self._receive.bytes_received + sum(exchange.bytes_received for exchange in self._sends)

    def send(self, frame: Frame) -> None:
        """As `Connection.send`."""
        buffers = encode_frame(frame, self.limits)
        try:
            with self._sending:
                self._check_open()
                for piece in pieces(buffers, dialect.PIECE_BYTES):
                    self._send_piece(piece)
        except OSError as error:
            raise TransportError(self._end(f"cannot send: {error}")) from error
        except BaseException:
            self._end("the connection was interrupted while it sent a frame")
            raise
        finally:
            self._release_if_ended()

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._receiving.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"{self.peer}: another thread is receiving, for {timeout} s and longer")
        try:
            self._check_open()
            while not self._decoder.frames:
                self._receive_some(deadline)
            return self._decoder.frames.popleft()
        except BaseException:
            if self._receive.torn:
                self._end("the connection was interrupted while it took in bytes")
            raise
        finally:
            self._receiving.release()
            self._release_if_ended()

    def close(self) -> None:
        """As `Connection.close`. The server is told once it has what was sent before."""
        self._say_goodbye()
        self._end("the connection was closed at this end")
        self._release_if_ended()

    def pulse(self) -> None:
        """Read what has come if nobody else does, so that one `receive` always waits at the server. Never blocks."""
        if self._process != os.getpid() or not self._receiving.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            while not self._ended and not self._decoder.frames:
                self._receive_some(now)
        except (TimeoutError, TransportError, ProtocolError):
            return  # nothing there, or the next call raises what it finds
        finally:
            self._receiving.release()

    # --- opening, sending, closing --------------------------------------------------------------------------

    def _open(self, timeout: float) -> str:
        exchange = self._sends[0]
        deadline = time.monotonic() + timeout
        try:
            exchange.request(dialect.OPEN, "")
            if not exchange.read(deadline):
                raise TimeoutError(f"no answer in {timeout} s")
        except (OSError, ProtocolError) as error:
            exchange.reopen()
            raise TransportError(f"no Djinn server answers at {self.peer.removeprefix('server ')}: {error}") from error
        response = exchange.response
        if response is None or response.status != _CREATED or not response.header(dialect.CHANNEL):
            answer = _describe(exchange)
            exchange.reopen()
            raise TransportError(f"no Djinn server answers at {self.peer.removeprefix('server ')}: {answer}")
        return response.header(dialect.CHANNEL)

    def _send_piece(self, piece: Sequence[Buffer]) -> None:
        exchange = self._sends[self._sent % len(self._sends)]
        self._settle(exchange)
        try:
            exchange.request(dialect.SEND, self._headers(self._sent), piece)
        except OSError as error:
            raise TransportError(_last_words(exchange) or str(error)) from error
        self._sent += 1

    def _settle(self, exchange: Exchange) -> None:
        """Wait for the answer to the last request on `exchange`, which must be a good one."""
        exchange.read(None)
        response = exchange.response
        if response is not None and response.status not in {_NO_CONTENT, _CREATED}:
            raise TransportError(_describe(exchange))

    def _collect_answers(self) -> None:
        """Read the answers to sends that have come. Never blocks; trouble is left to the next `send`."""
        if self._ended or not self._sending.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            for exchange in self._sends:
                exchange.read(now)
        except (OSError, ProtocolError):
            return
        finally:
            self._sending.release()

    def _say_goodbye(self) -> None:
        """Tell the server that it is over, after what was sent before: it cannot see a connection go."""
        if self._ended or self._process != os.getpid() or not self._sending.acquire(timeout=_PATIENCE_SECONDS):
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        try:
            if all(exchange.read(deadline) for exchange in self._sends):
                self._sends[0].request(dialect.CLOSE, self._headers(self._sent))
                self._sends[0].read(deadline)
        except (OSError, ProtocolError):
            return  # it is over, one way or the other
        finally:
            self._sending.release()

    # --- receiving ------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._receive.request(dialect.RECEIVE, self._headers(self._answered))

    def _receive_some(self, deadline: float | None) -> None:
        try:
            came = self._receive.read_some(deadline)
            if self._receive.response is not None and self._receive.response.complete:
                self._take_answer(self._receive.response.status)
        except ProtocolError as error:
            self._say_goodbye()
            raise ProtocolError(self._end(str(error))) from error
        except OSError as error:
            self._ask_again(error)
            came = True
        if not came:
            raise TimeoutError(f"{self.peer}: nothing came in time")

    def _take_answer(self, status: int) -> None:
        self._failures = 0
        if status == _OK:
            self._answered += 1
        elif status == _GONE:
            raise TransportError(self._end("the other end closed the connection"))
        elif status != _NO_CONTENT:
            raise TransportError(self._end(_describe(self._receive)))
        # Frames that have come are delivered even where the next request finds nobody.
        self._ask()

    def _ask_again(self, error: OSError) -> None:
        """After a break: nothing is lost as long as no answer had begun."""
        response = self._receive.response
        self._failures += 1
        if self._ended or (response is not None and response.begun) or self._failures >= _ATTEMPTS:
            raise TransportError(self._end(f"cannot receive: {error}")) from error
        self._receive.reopen()
        try:
            self._ask()
        except OSError as again:
            raise TransportError(self._end(f"cannot receive: {again}")) from again

    # --- state ----------------------------------------------------------------------------------------------

    def _headers(self, sequence: int) -> str:
        return f"{dialect.CHANNEL}: {self._channel}\r\n{dialect.SEQUENCE}: {sequence}\r\n"

    def _check_open(self) -> None:
        if self._ended:
            raise TransportError(self._ended)

    def _end(self, reason: str) -> str:
        if not self._ended:
            self._ended = f"{self.peer}: {reason}"
            if self._process == os.getpid():
                for exchange in (*self._sends, self._receive):
                    exchange.shut_down()
        return self._ended

    def _release_if_ended(self) -> None:
        """Close the sockets once no thread is inside a call on them, for their numbers may be given out again at once."""
        if not self._ended or not self._sending.acquire(timeout=_LEAVE_SECONDS):
            return
        if self._receiving.acquire(timeout=_LEAVE_SECONDS):
            for exchange in (*self._sends, self._receive):
                exchange.reopen()
            self._receiving.release()
        self._sending.release()


def pieces(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """`buffers` cut, without copying, into lists of at most `size` bytes in all."""
    piece: list[Buffer] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            piece.append(rest[:room])
            rest, room = rest[room:], room - min(room, len(rest))
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _describe(exchange: Exchange) -> str:
    response = exchange.response
    if response is None:
        return "there was no answer"
    said = " ".join(response.text.split())[:_SAID_LIMIT]
    # A page for people to look at says no more than its status does.
    return f"the answer was HTTP {response.status}" + (f": {said}" if said and not said.startswith("<") else "")


def _last_words(exchange: Exchange) -> str:
    """What the server said before it hung up on a request."""
    try:
        return _describe(exchange) if exchange.read(time.monotonic() + _LEAVE_SECONDS) else ""
    except (OSError, ProtocolError):
        return ""
