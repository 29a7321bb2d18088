"""The client's side of a persistent HTTP connection: requests and responses in turn."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import attrs

from djinn.errors import TransportError
from djinn.hooks import Buffer, FrameDecoder, TlsOptions
from djinn_core.protocol.net.sockets import send_buffers, wait_readable
from djinn_core.protocol.net.tls_sockets import TlsSocket, dial_tls
from djinn_core.system.tcp import DONTWAIT, READABLE, keep_alive, poller, wait_in_kernel
from djinn_http.dialect import CONTENT_TYPE, IDLE_SECONDS, PATH
from djinn_http.responses import ResponseReader


@attrs.frozen
class Endpoint:
    """Address of a server.

    Attributes:
        host: host name or IP address.
        port: TCP port.
        prefix: path before the protocol's paths, if a reverse proxy needs one.
        tls: TLS options, or None to connect without TLS.
    """

    host: str
    port: int
    prefix: str
    tls: TlsOptions | None = None

    @property
    def authority(self) -> str:
        """Return the value of the `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL that clients connect to."""
        return f"{'http' if self.tls is None else 'https'}://{self.authority}"


class HttpExchange:
    """An HTTP connection to an endpoint. It is opened at the first request, and reopened after it breaks.

    Attributes:
        response: response to the last request, which may be incomplete, or None before the first request.
        torn: True if a request or a response is incomplete, for example after an interrupt.
        bytes_sent: bytes sent over all connections so far.
        bytes_received: bytes received over all connections so far.
    """

    def __init__(self, endpoint: Endpoint, decoder: FrameDecoder, timeout: float) -> None:
        """Create an exchange without connecting.

        Args:
            endpoint: address of the server.
            decoder: receives the bodies of responses.
            timeout: seconds for connecting.
        """
        self.response: ResponseReader | None = None
        self.torn = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self._endpoint = endpoint
        self._decoder = decoder
        self._timeout = timeout
        self._socket: socket.socket | TlsSocket | None = None
        self._counted = [0, 0]  # of what the connection under TLS has sent and received
        self._poll = poller()
        self._used = 0.0
        self._has_ended = False

    @property
    def waiting(self) -> bool:
        """Return True if the last request has no complete response."""
        return self.response is not None and not self.response.complete

    def request(self, action: str, headers: str, body: Sequence[Buffer] = ()) -> None:
        """Send a POST request. The previous response must be complete.

        Args:
            action: last part of the path, such as `dialect.SEND`.
            headers: further header lines, each with its line end.
            body: buffers of the body.

        Raises:
            OSError: the connection failed or broke.
        """
        sock = self._connected()
        self.response = ResponseReader(self._decoder)
        length = sum(map(len, body))
        head = (
            f"POST {self._endpoint.prefix}{PATH}{action} HTTP/1.1\r\nHost: {self._endpoint.authority}\r\n"
            f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\n{headers}\r\n"
        )
        self.torn = True
        unsent: Sequence[Buffer] = [head.encode("ascii"), *body]
        while unsent:  # where writes do not wait, a pending interrupt ends them, too
            unsent = send_buffers(sock, unsent, self._count_sent)  # type: ignore[arg-type] # has what is called
        if isinstance(sock, TlsSocket):
            sock.flush()
        self.torn = False

    def read(self, deadline: float | None) -> bool:
        """Read the response. Return True if it is complete, False if `deadline` (`time.monotonic`) has passed.

        Raises:
            OSError: the connection broke.
            ProtocolError: the response is not from a Djinn server.
        """
        while self.waiting:
            # Checked here as well, because a server that never stops sending would never reach the deadline.
            if not self.read_some(deadline) or (deadline is not None and time.monotonic() > deadline):
                return False
        return True

    def read_some(self, deadline: float | None) -> bool:
        """Read once, waiting at most until `deadline` (`time.monotonic`). Return False if nothing arrived.

        Raises:
            OSError: the connection broke.
            ProtocolError: the response is not from a Djinn server.
        """
        sock, response = self._socket, self.response
        if sock is None or response is None:
            raise TransportError("the connection was closed")
        if not (isinstance(sock, TlsSocket) and sock.has_buffered) and not wait_readable(self._poll, deadline):
            return False
        self.torn = True
        with suppress(BlockingIOError):  # spurious wake-up; the caller retries
            self._take(sock, response)
        self.torn = False
        return True

    def give_up_socket(self) -> tuple[socket.socket | TlsSocket, bytes]:
        """Return the socket, which the caller then owns, and the bytes received after the last response."""
        sock, response = self._socket, self.response
        if sock is None or response is None:
            raise TransportError("the connection was closed")
        self._poll.unregister(sock)
        self._socket = None
        return sock, response.rest

    def reopen(self) -> None:
        """Close the connection. The next request opens a new one."""
        self.response = None
        self.torn = False
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
            self._socket = None
            self._counted = [0, 0]

    def shut_down(self) -> None:
        """Make threads that wait on the connection raise an error. Later requests also fail."""
        self._has_ended = True
        sock = self._socket
        if sock is not None:
            with suppress(OSError):  # it was closed already
                sock.shutdown(socket.SHUT_RDWR)

    def _take(self, sock: socket.socket | TlsSocket, response: ResponseReader) -> None:
        count = sock.recv_into(response.buffer(), 0, DONTWAIT)
        if not count:
            raise TransportError("the peer closed the connection before it had answered")
        self._count(0, count)
        response.received(count)
        self._used = time.monotonic()

    def _count_sent(self, count: int) -> None:
        self._count(count, 0)

    def _count(self, sent: int, received: int) -> None:
        if isinstance(self._socket, TlsSocket):
            totals = [self._socket.bytes_sent, self._socket.bytes_received]
            sent, received = (total - before for total, before in zip(totals, self._counted, strict=True))
            self._counted = totals
        self.bytes_sent += sent
        self.bytes_received += received

    def _connected(self) -> socket.socket | TlsSocket:
        if self._socket is not None and not self._is_usable():
            self._replace()
        if self._socket is None:
            self._adopt(self._connect())
        if self._has_ended or self._socket is None:
            raise TransportError("the connection was closed")
        self._used = time.monotonic()
        return self._socket

    def _is_usable(self) -> bool:
        if self.response is not None and not self.response.reusable:
            return False
        # A readable idle connection means that the peer hung up.
        return time.monotonic() - self._used < IDLE_SECONDS and not self._poll.poll(0)

    def _replace(self) -> None:
        """Open a new connection in place of the present one. If that fails, keep the present one if it still works."""
        try:
            fresh = self._connect()
        except OSError:
            if self.response is None or not self.response.reusable or self._poll.poll(0):
                raise
            return
        self.reopen()
        self._adopt(fresh)

    def _connect(self) -> socket.socket | TlsSocket:
        sock = socket.create_connection((self._endpoint.host, self._endpoint.port), self._timeout)
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        if self._endpoint.tls is None:
            return sock
        sock.settimeout(self._timeout)
        return dial_tls(sock, self._endpoint.tls, self._endpoint.host, self._timeout)

    def _adopt(self, sock: socket.socket | TlsSocket) -> None:
        self._socket = sock
        wait_in_kernel(sock, 0.0, 0.0)
        self._poll.register(sock, READABLE)
