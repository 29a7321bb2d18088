"""The HTTP server: a thread with an event loop for each listen address."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import threading
import weakref
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from djinn.errors import TransportError
from djinn.hooks import Connection, Limits, Listener, get_logger
from djinn_core.protocol.net.http_hosts import HOSTS_VARIABLE, is_called, is_well_formed, own_names
from djinn_core.protocol.net.sockets import serve_connection
from djinn_http import dialect
from djinn_http.channel import Channel
from djinn_http.counting import (
    COUNTING,
    Counting,
    CountingBufferedProtocol,
    CountingProtocol,
    CountingTransport,
)
from djinn_http.pace import RequestTimeLimit
from djinn_http.upgraded import ACCEPTING, AcceptedUpgrade

# Twice as much may wait in memory for each request. What came in a larger buffer would have left the processor's caches, and
# the allocator would have given its pages back, by the time that it is read.
_READ_BYTES: Final = 256 << 10
_MAX_CHANNELS: Final = 1024
_MAX_UNAUTHENTICATED: Final = 512  # connections, each of which has a few seconds to show a token
_BACKLOG: Final = 128
_PAUSE_SECONDS: Final = 0.1
_SWEEP_SECONDS: Final = 1.0
_START_SECONDS: Final = 10.0
_HANDSHAKE_SECONDS: Final = 5
_UNREAD_SECONDS: Final = 2  # for the rest of a request that was refused

log = get_logger("djinn.transport.http")


class _Malformed(logging.Filter):
    """Log filter that logs one line in place of a traceback for invalid HTTP, which any client can send in bulk."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the record of invalid HTTP, and log a short line instead. Pass all other records."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        log.info("refused a request that is not HTTP/1.1", reason=error.message.partition(":")[0])
        return False


_requests = logging.getLogger("djinn.transport.http.requests")
_requests.addFilter(_Malformed())


class _Frugal(SSLProtocol):
    """TLS protocol with a small receive buffer. After the handshake, the listener sets the usual `max_size`."""

    max_size = 16 << 10


class HttpListener(Listener):
    """HTTP server on a bound socket, which it owns.

    Attributes:
        url: URL that a client passes to `connect`.
    """

    def __init__(
        self,
        sock: socket.socket,
        url: str,
        limits: Limits,
        accept: Callable[[Connection], bool | None],
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Start the server.

        Args:
            sock: a bound TCP socket.
            url: URL of the server.
            limits: largest frame of a client that is not authenticated.
            accept: called in a new thread with each connection.
            context: TLS context, or None to serve without TLS.

        Raises:
            TransportError: the server cannot start.
        """
        self.url = url
        self._context = context
        self._names = own_names(url)
        self._connections: dict[CountingTransport, None] = {}  # oldest first
        self._socket = sock
        self._limits = limits
        self._accept = accept
        self._channels: dict[str, Channel] = {}
        self._upgraded: weakref.WeakSet[AcceptedUpgrade] = weakref.WeakSet()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing = asyncio.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"djinn-http {url}", daemon=True).start()
        if not self._started.wait(_START_SECONDS):
            raise TransportError(f"cannot listen at {url}: the server did not start in {_START_SECONDS:.0f} s")
        if self._failure is not None:
            raise TransportError(f"cannot listen at {url}: {self._failure}")

    def close(self) -> None:
        """Stop accepting connections, and release the address. The thread ends with the last channel."""
        with suppress(RuntimeError):  # the loop is over: closed before
            self._loop.call_soon_threadsafe(self._closing.set)
            self._closed.wait(_START_SECONDS)

    # --- in the event loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            self._failure = error
            log.exception("the HTTP server ended", url=self.url)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._closed.set()
            self._started.set()

    async def _serve(self) -> None:
        http = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_requests,
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
            lingering_time=_UNREAD_SECONDS,
        )
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._loop.add_reader(self._socket, self._accept_waiting, http)
        self._started.set()
        sweeping = self._loop.create_task(self._sweep())
        await self._closing.wait()
        self._loop.remove_reader(self._socket)
        # Clients take a connection for made before it is accepted.
        self._accept_waiting(http)
        self._socket.close()
        self._closed.set()
        await sweeping
        await http.shutdown(_SWEEP_SECONDS)

    def _accept_waiting(self, http: web.Server) -> None:
        """Accept all waiting TCP connections. `loop.create_server` is not used, because its `close` loses some of them."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # Out of file descriptors, say: the listener stays readable, so look again later and do not spin.
                log.warning("cannot accept a connection", url=self.url, error=str(error))
                self._pause_accepting(http)
                return
            connecting = self._loop.connect_accepted_socket(lambda: self._protocol(http), sock)
            task = self._loop.create_task(connecting)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _entered(self, connection: CountingTransport) -> None:
        """Record a new TCP connection. If too many connections are unauthenticated, close the oldest of them."""
        self._connections[connection] = None
        unauthenticated = [connection for connection in self._connections if not connection.pace.trusted]
        if len(unauthenticated) > _MAX_UNAUTHENTICATED:
            log.warning("too many connections are unauthenticated, closing the oldest of them", url=self.url)
            self._left(unauthenticated[0])
            unauthenticated[0].abort()

    def _left(self, connection: CountingTransport) -> None:
        self._connections.pop(connection, None)

    def _protocol(self, http: web.Server) -> Counting:
        if self._context is None:
            return CountingProtocol(http(), self._entered, self._left)
        # TLS is put in here and not by the loop, so that what is counted is what goes over the network.
        waiter = self._loop.create_future()
        secure = _Frugal(
            self._loop,
            http(),
            self._context,
            waiter,
            server_side=True,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=_UNREAD_SECONDS,
        )
        waiter.add_done_callback(partial(self._note_handshake, secure))
        return CountingBufferedProtocol(secure, self._entered, self._left)

    def _note_handshake(self, secure: _Frugal, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            log.info("a connection could not be established", url=self.url, error=str(error))
        else:
            secure.max_size = SSLProtocol.max_size  # type: ignore[misc] # of this one alone

    def _pause_accepting(self, http: web.Server) -> None:
        def resume() -> None:
            if not self._closing.is_set():
                self._loop.add_reader(self._socket, self._accept_waiting, http)

        self._loop.remove_reader(self._socket)
        self._loop.call_later(_PAUSE_SECONDS, resume)

    async def _sweep(self) -> None:
        """Periodically drop ended channels, end expired channels, and keep upgraded connections open through proxies.

        Return when the listener is closed, and all channels and upgraded connections have ended.
        """
        while self._channels or self._upgraded or not self._closing.is_set():
            await asyncio.sleep(_SWEEP_SECONDS)
            self._abort_slow()
            self._forget_over()
            self._pulse()

    def _pulse(self) -> None:
        """Send a message over each upgraded connection. Drop the connections that have ended."""
        for connection in list(self._upgraded):
            if connection.hung_up:
                self._upgraded.discard(connection)
            else:
                connection.pulse()

    def _forget_over(self) -> None:
        for channel in list(self._channels.values()):
            channel.end_if_expired()
            if channel.is_over:
                del self._channels[channel.id]

    def _abort_slow(self) -> None:
        for connection in [connection for connection in self._connections if connection.pace.too_slow]:
            log.warning("closed a connection whose client sends too slowly", url=self.url)
            self._left(connection)
            connection.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport: object = None if request.transport is None else request.transport.get_extra_info(COUNTING)
        if not isinstance(transport, CountingTransport):
            return web.Response(status=500)
        transport.pace.headers_complete()
        try:
            return await self._respond(request, transport)
        finally:
            transport.pace.response_sent()

    async def _respond(self, request: web.BaseRequest, transport: CountingTransport) -> web.StreamResponse:
        if (refusal := refuse(request, self._names)) is not None:
            log.warning("request refused", url=self.url, peer=str(request.remote), reason=refusal.text)
            transport.take()
            refusal.force_close()
            return refusal
        action = request.path.rpartition(dialect.PATH)[2]
        if action == dialect.OPEN and _may_upgrade(request):
            return self._upgrade(request, transport)
        channel = self._open(request) if action == dialect.OPEN else self._channel(request)
        if channel is None:
            transport.take()
            is_closed = action != dialect.OPEN
            no = web.Response(
                status=410 if is_closed else 503, text="no such channel" if is_closed else "too many channels"
            )
            no.force_close()
            return no
        try:
            with channel.request(transport):
                response = await _answer(request, action, channel, transport.pace)
                # Written here and not by aiohttp, so that its bytes are counted as this channel's.
                await response.prepare(request)
                await response.write_eof()
        except ConnectionError as error:
            log.info("a client hung up", url=self.url, peer=channel.peer, error=str(error))
            return web.Response(status=499)
        return response

    def _channel(self, request: web.BaseRequest) -> Channel | None:
        return self._channels.get(request.headers.get(dialect.CHANNEL, ""))

    def _open(self, request: web.BaseRequest) -> Channel | None:
        if len(self._channels) >= _MAX_CHANNELS and not self._drop_unauthenticated():
            log.warning("refused a new channel: the limit is reached", url=self.url, channels=len(self._channels))
            return None
        peer = f"client {request.remote} by HTTP"
        channel = Channel(secrets.token_urlsafe(24), peer, self._limits, self._loop, _certificate(request))
        arguments = (channel, peer, self._accept)
        try:
            threading.Thread(target=serve_connection, args=arguments, name=f"djinn-serve {peer}", daemon=True).start()
        except RuntimeError as error:
            log.warning("cannot serve a connection", url=self.url, peer=peer, error=str(error))
            return None
        self._channels[channel.id] = channel
        return channel

    def _upgrade(self, request: web.BaseRequest, transport: CountingTransport) -> web.StreamResponse:
        """Serve the connection's socket in a thread, outside of the event loop. The response is sent only on failure."""
        _, bytes_received = transport.take()
        try:
            sock = transport.get_extra_info("socket").dup()
        except OSError as error:  # out of file descriptors, say
            log.warning("cannot serve a connection", url=self.url, peer=str(request.remote), error=str(error))
            return web.Response(status=503, text="too many connections")
        transport.abort()  # of this copy of the socket
        peer = f"client {request.remote} by HTTP"
        arguments = (sock, peer, bytes_received)
        try:
            threading.Thread(
                target=self._serve_upgraded, args=arguments, name=f"djinn-serve {peer}", daemon=True
            ).start()
        except RuntimeError as error:
            log.warning("cannot serve a connection", url=self.url, peer=peer, error=str(error))
            sock.close()
        return web.Response(status=101)

    def _serve_upgraded(self, sock: socket.socket, peer: str, received: int) -> None:
        try:
            sock.setblocking(True)
            sock.sendall(ACCEPTING)
            connection = AcceptedUpgrade(sock, self._limits, peer, len(ACCEPTING), received)
        except OSError as error:
            log.info("a connection could not be established", url=self.url, peer=peer, error=str(error))
            sock.close()
            return
        with suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._upgraded.add, connection)
        serve_connection(connection, peer, self._accept)

    def _drop_unauthenticated(self) -> bool:
        """End the oldest channel without a valid token, so that authenticated clients can connect.

        Return False if all channels have a valid token.
        """
        for channel in self._channels.values():
            if not channel.trusted:
                channel.end("there are too many unauthenticated connections")
                del self._channels[channel.id]
                return True
        return False


def _may_upgrade(request: web.BaseRequest) -> bool:
    """Return True if the client requests an upgrade and the connection can leave the event loop."""
    asks = (
        request.headers.get("Upgrade", "") == dialect.UPGRADE
        and "upgrade" in request.headers.get("Connection", "").lower()
    )
    return asks and request.transport is not None and request.transport.get_extra_info("ssl_object") is None


def _certificate(request: web.BaseRequest) -> bytes:
    """Return the client's TLS certificate in DER, or empty bytes if the client has none."""
    tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    return (tls.getpeercert(binary_form=True) or b"") if tls is not None else b""


def refuse(request: web.BaseRequest, names: frozenset[str]) -> web.Response | None:
    """Return an error response to a request that no Djinn client sends, such as a browser's. Return None for other requests.

    `names`: host names of this server that the `Host` header may have.
    """
    hosts = request.headers.getall("Host", [])
    if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
        return web.Response(status=403, text="this server refuses requests of web pages")
    if len(hosts) != 1 or not is_well_formed(hosts[0]):
        return web.Response(status=400, text="the Host header is missing or malformed")
    if not is_called(hosts[0], names):
        return web.Response(
            status=421,
            text=f"the Host header does not have a name of this server: its operator adds names with {HOSTS_VARIABLE}",
        )
    if dialect.PATH not in request.path:
        return web.Response(status=404, text="this is a Djinn server: connect with djinn.configure(servers=[...])")
    if request.method != "POST":
        return web.Response(status=405, text="only POST is answered", headers={"Allow": "POST"})
    if request.content_type != dialect.CONTENT_TYPE:
        return web.Response(status=415, text=f"only {dialect.CONTENT_TYPE} is read")
    return None


async def _answer(
    request: web.BaseRequest, action: str, channel: Channel, pace: RequestTimeLimit
) -> web.StreamResponse:
    if action == dialect.OPEN:
        return web.Response(status=201, headers={dialect.CHANNEL: channel.id})
    sequence = request.headers.get(dialect.SEQUENCE, "")
    if not (sequence.isascii() and sequence.isdigit() and len(sequence) < 20):
        return web.Response(status=400, text=f"{dialect.SEQUENCE} is missing or malformed")
    match action:
        case dialect.SEND:
            return await channel.take_in(request, int(sequence), pace)
        case dialect.RECEIVE:
            return await channel.hand_out(request, int(sequence))
        case dialect.CLOSE:
            return await channel.farewell(int(sequence))
        case _:
            return web.Response(status=404, text="no such action")
