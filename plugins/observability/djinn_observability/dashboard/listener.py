"""HTTP server of the operations routes: one thread with an event loop, and one request per connection."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Final

import attrs
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from djinn.errors import TransportError
from djinn.hooks import Credentials, OperationsAddress, get_logger, server_context
from djinn_core.protocol.addresses import network_location
from djinn_core.protocol.net.http_hosts import is_called, own_names
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_observability.dashboard.responses import EventFeed, HttpResponse
from djinn_observability.dashboard.routes import PROBES, Operations

REQUEST_SECONDS: Final = 5.0  # for a whole request, including the TLS handshake
_MAX_CONNECTIONS: Final = 64  # connections at a time
_REQUEST_BYTES: Final = 16 << 10  # of a request: only a request line and headers are expected
_MAX_FEEDS: Final = 64
_PROBE_THREADS: Final = 2
_WRITE_SECONDS: Final = 20.0  # within which a client must receive an event
_CHECK_SECONDS: Final = 2.0  # after which the token of a feed is checked again
_PAUSE_SECONDS: Final = 0.1
# Content security policy: no foreign resources, no inline scripts or styles, no framing by other pages.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Server": "djinn",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_CLOSE_SECONDS: Final = 10.0
_REFUSAL_SECONDS: Final = (0.05, 0.25)  # random pause before a refusal: slows down guessing
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_log = get_logger("djinn.operations")


class _Malformed(logging.Filter):
    """Log filter that writes one line, not a traceback, for a malformed request, because any client can send many."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the record of a malformed request, and log one line instead."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        _log.info(
            "refused a request to the operations port that is not HTTP/1.1", reason=error.message.partition(":")[0]
        )
        return False


_requests = logging.getLogger("djinn.operations.requests")
_requests.addFilter(_Malformed())


class OperationsListener:
    """HTTP server for the routes of `Operations`.

    Attributes:
        url: address of the listener.
    """

    def __init__(self, address: OperationsAddress, operations: Operations) -> None:
        """Listen at an address.

        Raises:
            TransportError: the address cannot be bound.
        """
        host, context = address.host, None if address.tls is None else server_context(address.tls)
        try:
            self._socket = _listening_socket(host, address.port)
        except OSError as error:
            address_text = network_location(host, address.port)
            raise TransportError(f"cannot listen for operations at {address_text}: {error}") from error
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{network_location(host, self._socket.getsockname()[1])}"
        self._names = own_names(self.url)
        self._operations, self._context = operations, context
        self._unauthenticated = UnauthenticatedLimit(_MAX_CONNECTIONS)
        self._connections: dict[web.RequestHandler, _Connection] = {}
        self._feeds = 0
        # Feeds and metrics wait for executors, so probes and feeds have separate threads.
        self._probe_threads = ThreadPoolExecutor(_PROBE_THREADS, "djinn-probe")
        self._feed_threads = ThreadPoolExecutor(_MAX_FEEDS, "djinn-feed")
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="djinn-operations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        with suppress(RuntimeError):  # the loop has ended: already closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_SECONDS)

    # --- in the event loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())
        self._probe_threads.shutdown(wait=False)
        self._feed_threads.shutdown(wait=False)

    async def _serve(self) -> None:
        http = web.Server(self._handle, handler_cancellation=True, access_log=None, logger=_requests)
        accepting = asyncio.create_task(self._accept(http))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({accepting, closing}, return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()

    async def _accept(self, http: web.Server) -> None:
        """Accept connections, each in a separate task."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            try:
                sock, address = await loop.sock_accept(self._socket)
            except OSError as error:  # out of file descriptors, say
                _log.warning("cannot accept a connection for operations", url=self.url, error=str(error))
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = asyncio.create_task(self._converse(sock, str(address[0]), http))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _converse(self, sock: socket.socket, peer: str, http: web.Server) -> None:
        """Serve one connection, within a time limit until a feed begins. Too many connections may end it earlier."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        handler = http()
        self._connections[handler] = connection = _Connection(handler, loop.create_future(), loop.create_future())
        transport: asyncio.BaseTransport | None = None
        try:
            with self._unauthenticated.counted(_TaskCloser(task)):
                async with asyncio.timeout(REQUEST_SECONDS):
                    transport, _ = await loop.connect_accepted_socket(lambda: connection, sock, ssl=self._context)
                    await asyncio.wait(
                        {connection.connection_ended, connection.is_feed}, return_when=asyncio.FIRST_COMPLETED
                    )
            await connection.connection_ended  # of a feed, whose client has shown a valid token
        except (OSError, TimeoutError) as error:
            _log.info("a connection for operations broke off", peer=peer, error=repr(error))
        finally:
            self._connections.pop(handler, None)
            if isinstance(transport, asyncio.Transport):
                transport.abort()
            else:
                sock.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        page = await self._answer(request)
        if isinstance(page, EventFeed):
            return await self._feed(request, page)
        headers = _HEADERS | {"Content-Type": page.content_type}
        if page.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        response = web.Response(status=page.status, body=page.body, headers=headers)
        response.force_close()
        return response

    async def _feed(self, request: web.BaseRequest, feed: EventFeed) -> web.StreamResponse:
        """Send events until the client is gone or its token is no longer valid."""
        if self._feeds >= _MAX_FEEDS:
            return web.Response(
                status=HTTPStatus.SERVICE_UNAVAILABLE, text="too many pages are open\n", headers=_HEADERS
            )
        response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        response.force_close()
        self._feeds += 1
        try:
            await response.prepare(request)
            if (connection := self._connections.get(request.protocol)) is not None:
                connection.is_feed.set_result(None)
            loop, credentials = asyncio.get_running_loop(), _credentials(request)
            checked_at = loop.time()
            while True:
                data = await loop.run_in_executor(self._feed_threads, feed.next)
                async with asyncio.timeout(_WRITE_SECONDS):
                    await response.write(b"data: " + data + b"\n\n")
                await asyncio.sleep(feed.seconds)
                if loop.time() - checked_at > _CHECK_SECONDS:
                    checked_at = loop.time()
                    if not await loop.run_in_executor(self._feed_threads, self._operations.admits, credentials):
                        break
        except (OSError, TimeoutError) as error:
            _log.info("a feed broke off", peer=str(request.remote), error=repr(error))
        except Exception as error:
            _log.exception("a feed failed", path=request.path[:64], error=repr(error))
        finally:
            self._feeds -= 1
        return response

    async def _answer(self, request: web.BaseRequest) -> HttpResponse | EventFeed:
        hosts = request.headers.getall("Host", [])
        path = request.rel_url.raw_path
        if not _is_same_origin(request) or (_is_from_browser(request) and not self._operations.serves_browsers(path)):
            return HttpResponse(HTTPStatus.FORBIDDEN, b"this server does not talk to web pages\n")
        if len(hosts) != 1 or not is_called(hosts[0], self._names):
            return HttpResponse(
                HTTPStatus.MISDIRECTED_REQUEST, b"the Host header is missing, or names another server\n"
            )
        operations, credentials = self._operations, _credentials(request)
        respond: Callable[[], HttpResponse | EventFeed]
        if request.method == "POST":
            respond = partial(operations.act, path, credentials)
        elif request.method == "GET":
            respond = partial(operations.answer, path, credentials, request.headers.get("Accept", ""))
        else:
            return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and POST are answered\n")
        # In a thread: files are read, and metrics of many executors take a while.
        threads = self._probe_threads if path in PROBES else None
        response = await asyncio.get_running_loop().run_in_executor(threads, respond)
        if isinstance(response, HttpResponse) and response.status == HTTPStatus.UNAUTHORIZED:
            await asyncio.sleep(random.uniform(*_REFUSAL_SECONDS))  # noqa: S311 - not for secrecy
        return response


@attrs.frozen
class _TaskCloser:
    """End a connection by cancelling its task."""

    task: asyncio.Task[None]

    def close(self) -> None:
        """Cancel the task. Called in the event loop only, when another connection replaces this one."""
        self.task.cancel()


class _Connection(asyncio.Protocol):
    """aiohttp's protocol for a connection, limited to a request of `_REQUEST_BYTES`.

    Attributes:
        connection_ended: future that is done when the connection has ended.
        is_feed: future that is done if the response is a feed, which has no time limit.
    """

    def __init__(
        self, http: web.RequestHandler, connection_ended: asyncio.Future[None], is_feed: asyncio.Future[None]
    ) -> None:
        self._http = http
        self._bytes_left = _REQUEST_BYTES
        self._transport: asyncio.Transport | None = None
        self.connection_ended = connection_ended
        self.is_feed = is_feed
        self.pause_writing, self.resume_writing = http.pause_writing, http.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection, as `asyncio.Protocol` requires."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Count and forward received bytes, as `asyncio.Protocol` requires."""
        assert self._transport is not None
        self._bytes_left -= len(data)
        if self._bytes_left >= 0:
            self._http.data_received(data)
        elif not self._transport.is_closing():
            self._transport.write(_TOO_LARGE)
            self._transport.close()

    def eof_received(self) -> None:
        """Forward the end of input, as `asyncio.Protocol` requires."""
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the connection as ended, as `asyncio.Protocol` requires."""
        self._http.connection_lost(exc)
        if not self.connection_ended.done():
            self.connection_ended.set_result(None)


def _listening_socket(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.create_server(address[:2], family=family, backlog=_MAX_CONNECTIONS)
    sock.setblocking(False)
    return sock


def _is_from_browser(request: web.BaseRequest) -> bool:
    """Return True if a browser sent the request."""
    return "Origin" in request.headers or "Sec-Fetch-Site" in request.headers


def _is_same_origin(request: web.BaseRequest) -> bool:
    """Return True unless a page of another site sent the request."""
    origin = request.headers.get("Origin")
    own = origin is None or origin.partition("://")[2] == request.headers.get("Host")
    return own and request.headers.get("Sec-Fetch-Site", "none") in {"none", "same-origin"}


def _credentials(request: web.BaseRequest) -> Credentials:
    token = _bearer(request.headers.get("Authorization", ""))
    return Credentials(token, _certificate(request), str(request.remote))


def _certificate(request: web.BaseRequest) -> bytes:
    """Return the client certificate in DER, or empty bytes without a certificate."""
    tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    return (tls.getpeercert(binary_form=True) or b"") if tls is not None else b""


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
