"""The server's end of a channel: a blocking `Connection` for threads, over HTTP requests in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Connection, Frame, Limits, encode_frame
from djinn_http import dialect
from djinn_http.counting import CountingTransport
from djinn_http.inbox import FrameInbox
from djinn_http.outbox import FrameOutbox, Parcel
from djinn_http.pace import RequestTimeLimit

# A response up to this size goes out in one piece, with its headers; larger ones are written bit by bit from where they
# lie, because asyncio copies what the socket does not take at once.
_WHOLE_BYTES: Final = 64 << 10
_WRITE_BYTES: Final = 256 << 10
# Maximum distance of a request's number ahead of the next expected one.
_AHEAD: Final = 64


class Channel(Connection):
    """A `Connection` to a client that uses HTTP requests.

    Attributes:
        id: the secret that names the channel in requests.
        peer: name of the client, for messages.
        certificate: the client's TLS certificate in DER, or empty if the client has none.
        bytes_sent: bytes sent by all requests of the channel, including HTTP headers.
        bytes_received: bytes received by all requests of the channel, including HTTP headers.
    """

    peer: str = ""
    certificate: bytes = b""
    bytes_sent: int = 0
    bytes_received: int = 0

    def __init__(
        self,
        channel_id: str,
        peer: str,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        certificate: bytes = b"",
    ) -> None:
        self.id = channel_id
        self.peer = peer
        self.certificate = certificate
        self._first_limits = limits
        self._inbox = FrameInbox(limits, loop)
        self._outbox = FrameOutbox(loop)
        self._closed = False
        # The following fields belong to the event loop.
        self._next_send = 0
        self._next_receive = 0
        self._last_response = b""
        self._turns = asyncio.Condition()
        self._waiting: asyncio.Task[None] | None = None
        self._requests = 0
        self._deserted = False
        self._last_seen = time.monotonic()

    # --- Connection, for threads ----------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Return the maximum size of a frame, in both directions."""
        return self._inbox.decoder.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._inbox.decoder.limits = limits

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes in memory of unfetched frames, as `Connection.buffered_bytes`."""
        return self._inbox.buffered_bytes

    @property
    def trusted(self) -> bool:
        """Return True if the channel has the wider limits for authenticated clients."""
        return self.limits.body > self._first_limits.body

    def send(self, frame: Frame) -> None:
        """Send a frame, as `Connection.send`. A large frame blocks until the client has fetched it."""
        buffers = encode_frame(frame, self.limits)
        self._outbox.put(buffers, sum(map(len, buffers)))

    def receive(self, timeout: float | None = None) -> Frame:
        """Receive a frame, as `Connection.receive`."""
        try:
            return self._inbox.next(timeout)
        except ProtocolError as error:
            self.end("the received data violates the protocol")
            raise ProtocolError(f"{self.peer}: {error}") from error

    def close(self) -> None:
        """Close the channel, as `Connection.close`. Earlier frames can be fetched for a few seconds."""
        self.end("the connection was closed at this end")
        self._inbox.clear()

    def end(self, reason: str) -> None:
        """End both directions. Earlier frames can still be received and fetched. `reason`: message for both sides."""
        self._closed = True
        error = TransportError(f"{self.peer}: {reason}")
        self._inbox.end(error)
        self._outbox.end(error)

    # --- requests, in the event loop ------------------------------------------------------------------------

    @contextmanager
    def request(self, transport: CountingTransport) -> Iterator[None]:
        """Count the bytes of a request of this channel over `transport`, and note that the client is alive."""
        self._requests += 1
        self._count(transport)
        transport.pace.owner = self
        try:
            yield
        except (ConnectionError, asyncio.CancelledError):
            # If the client does not return soon, the channel expires.
            self._deserted = True
            raise
        else:
            self._deserted = False
        finally:
            self._count(transport)
            self._requests -= 1
            self._last_seen = time.monotonic()

    def _count(self, transport: CountingTransport) -> None:
        sent, received = transport.take()
        self.bytes_sent += sent
        self.bytes_received += received

    def idle_seconds(self) -> float:
        """Return the seconds since the client's last request, or 0 during a request."""
        return 0.0 if self._requests else time.monotonic() - self._last_seen

    @property
    def is_over(self) -> bool:
        """Return True if the channel has ended, and its frames were fetched or cannot be fetched any more."""
        return self._closed and (self._outbox.over or self.idle_seconds() > dialect.LINGER_SECONDS)

    def end_if_expired(self) -> None:
        """End the channel if no request arrived for `EXPIRY_SECONDS`.

        If the client disconnected during a request, the time is `LINGER_SECONDS`.
        """
        patience = dialect.LINGER_SECONDS if self._deserted else dialect.EXPIRY_SECONDS
        if not self._closed and self.idle_seconds() > patience:
            self.end(f"the peer has sent nothing for {patience:.0f} s")

    async def take_in(self, request: web.BaseRequest, sequence: int, pace: RequestTimeLimit) -> web.StreamResponse:
        """Handle the `send` request with number `sequence`. Its body continues the stream of the previous `send`."""
        if not self._next_send <= sequence < self._next_send + _AHEAD:
            return web.Response(status=409, text=f"send request {sequence} arrived, and {self._next_send} was expected")
        async with self._turns:
            await self._turns.wait_for(lambda: self._closed or self._next_send == sequence)
        try:
            return await self._read_body(request, pace)
        finally:
            async with self._turns:
                self._next_send = sequence + 1
                self._turns.notify_all()

    async def hand_out(self, request: web.BaseRequest, sequence: int) -> web.StreamResponse:
        """Handle the `receive` request with number `sequence`: respond with waiting frames.

        Respond with status 204 if no frame arrives in time, or 410 if the channel has ended.
        """
        if sequence == self._next_receive - 1 and self._last_response:
            # The response was lost with its connection.
            return web.Response(body=self._last_response, content_type=dialect.CONTENT_TYPE)
        if sequence != self._next_receive:
            return web.Response(
                status=409, text=f"receive request {sequence} arrived, and {self._next_receive} was expected"
            )
        if self._waiting is not None:
            # The client repeats the request after a broken connection; the old request would take its frames.
            self._waiting.cancel()
        self._last_response = b""
        self._waiting = asyncio.current_task()
        try:
            batch = await self._outbox.batch(dialect.WAIT_SECONDS)
        finally:
            if self._waiting is asyncio.current_task():
                self._waiting = None
        if not batch:
            return web.Response(status=410 if self._outbox.over else 204)
        self._next_receive += 1
        return await self._write(request, batch)

    async def farewell(self, sequence: int) -> web.StreamResponse:
        """Handle a `close` request: wait for all `send` requests before number `sequence`, then end the channel."""
        async with self._turns:
            await self._turns.wait_for(lambda: self._closed or self._next_send >= sequence)
        self.end("the peer closed the connection")
        return web.Response(status=204)

    async def _read_body(self, request: web.BaseRequest, pace: RequestTimeLimit) -> web.StreamResponse:
        try:
            while not self._closed:
                with pace.waiting():
                    data = await request.content.readany()
                if not data or self._closed:
                    break
                self._inbox.take(data)
                await self._inbox.wait_for_space()
        except ProtocolError as error:
            self.end(str(error))
            return web.Response(status=400, text=str(error))
        except BaseException:
            self.end("the peer broke off in the middle of a frame")
            raise
        return web.Response(status=410 if self._closed else 204)

    async def _write(self, request: web.BaseRequest, parcels: Sequence[Parcel]) -> web.StreamResponse:
        size = sum(parcel.size for parcel in parcels)
        if size <= _WHOLE_BYTES:
            self._last_response = b"".join(buffer for parcel in parcels for buffer in parcel.buffers)
            self._outbox.written(parcels)
            return web.Response(body=self._last_response, content_type=dialect.CONTENT_TYPE)
        response = web.StreamResponse(headers={"Content-Type": dialect.CONTENT_TYPE, "Content-Length": str(size)})
        try:
            await response.prepare(request)
            for parcel in parcels:
                await self._write_parcel(response, parcel)
            await response.write_eof()
        except BaseException:
            self.end("the peer broke off while it fetched frames")
            raise
        finally:
            self._outbox.written(parcels)
        return response

    async def _write_parcel(self, response: web.StreamResponse, parcel: Parcel) -> None:
        for buffer in parcel.buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _WRITE_BYTES):
                if not self._outbox.is_alive(parcel):
                    raise TransportError(f"{self.peer}: closed while a frame was being fetched")
                await response.write(view[start : start + _WRITE_BYTES])
