"""Baselines of the transports: hand-written socket loops that echo."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import threading

import numpy as np

from djinn.hooks import TlsOptions

SMALL_BYTES = 64
CHUNK_BYTES = 1 << 20  # the fastest size for a plain aiohttp loop


def fresh(size: int) -> memoryview:
    """Return newly allocated memory that was never written."""
    return memoryview(np.empty(size, np.uint8))


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[sock.recv_into(view) :]


class RawSocket:
    """`sendmsg` and `recv_into` on a blocking TCP or Unix socket: the lower bound."""

    def __init__(self, family: int) -> None:
        self.family = family

    def serve(self, started) -> None:
        with socket.socket(self.family) as listener:
            listener.bind(("127.0.0.1", 0) if self.family == socket.AF_INET else tempfile.mktemp(prefix="bench-"))
            listener.listen()
            started(listener.getsockname())
            sock, _ = listener.accept()
        self._set(sock)
        with self._wrap(sock, accepted=True) as sock:
            while header := self._read_header(sock):
                view = fresh(int.from_bytes(header, "little"))
                receive_exactly(sock, view)
                self._send(sock, view)

    def connect(self, address) -> None:
        sock = socket.socket(self.family)
        sock.connect(address)
        self._set(sock)
        self.sock = self._wrap(sock, accepted=False)

    def exchange(self, data: memoryview) -> None:
        self._send(self.sock, data)
        view = fresh(int.from_bytes(self._read_header(self.sock), "little"))
        receive_exactly(self.sock, view)

    def close(self) -> None:
        self.sock.close()

    def _wrap(self, sock: socket.socket, *, accepted: bool) -> socket.socket:
        del accepted
        return sock

    def _read_header(self, sock: socket.socket) -> bytes:
        return sock.recv(8, socket.MSG_WAITALL)

    def _set(self, sock: socket.socket) -> None:
        if self.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, sock: socket.socket, view: memoryview) -> None:
        header = len(view).to_bytes(8, "little")
        sent_bytes = sock.sendmsg([header, view]) - len(header)
        sock.sendall(view[sent_bytes:])


class RawTls(RawSocket):
    """`RawSocket` over TLS."""

    def __init__(self, tls: TlsOptions) -> None:
        super().__init__(socket.AF_INET)
        self.contexts = contexts(tls)

    def _wrap(self, sock: socket.socket, *, accepted: bool) -> socket.socket:
        return self.contexts[accepted].wrap_socket(sock, server_side=accepted)

    def _send(self, sock: socket.socket, view: memoryview) -> None:
        sock.sendall(len(view).to_bytes(8, "little"))
        sock.sendall(view)

    def _read_header(self, sock: socket.socket) -> bytes:
        return sock.recv(8)


def contexts(tls: TlsOptions) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a client context that accepts any certificate, and a server context."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    assert tls.certificate is not None
    server.load_cert_chain(tls.certificate, tls.key)
    return client, server


class PlainAiohttp:
    """HTTP POST with aiohttp. Request and reply are sent in chunks and read into memory of their size."""

    def __init__(self, tls: TlsOptions | None = None) -> None:
        self.done = threading.Event()
        self.contexts = (None, None) if tls is None else contexts(tls)

    def serve(self, started) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started) -> None:
        from aiohttp import web

        async def handle(request: web.Request) -> web.StreamResponse:
            view = fresh(int(request.headers["Content-Length"]))
            await fill(view, request.content)
            response = web.StreamResponse(headers={"Content-Length": str(len(view))})
            await response.prepare(request)
            for start in range(0, len(view), CHUNK_BYTES):
                await response.write(view[start : start + CHUNK_BYTES])
            await response.write_eof()
            return response

        runner = web.ServerRunner(web.Server(handle, read_bufsize=CHUNK_BYTES))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.contexts[1]).start()
        started(runner.addresses[0][1])
        await asyncio.to_thread(self.done.wait)
        await runner.cleanup()

    def connect(self, port: int) -> None:
        from aiohttp import ClientSession, TCPConnector

        self.loop = asyncio.new_event_loop()
        context = self.contexts[0]
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}/"

        async def open_session() -> ClientSession:
            return ClientSession(read_bufsize=CHUNK_BYTES, connector=TCPConnector(ssl=context or True))

        self.session = self.loop.run_until_complete(open_session())

    def exchange(self, data: memoryview) -> None:
        self.loop.run_until_complete(self._exchange(data))

    async def _exchange(self, data: memoryview) -> None:
        async def chunks():
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

        headers = {"Content-Length": str(len(data))}
        async with self.session.post(self.url, data=chunks(), headers=headers) as response:
            await fill(fresh(len(data)), response.content)

    def close(self) -> None:
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        self.done.set()


async def fill(view: memoryview, stream) -> None:
    """Read from `stream` until `view` is full."""
    while len(view):
        data = await stream.readany()
        view[: len(data)] = data
        view = view[len(data) :]
