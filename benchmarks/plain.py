"""Baselines of the transports: hand-written socket loops. Both ends send back what comes."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading

import numpy as np

SMALL_BYTES = 64
CHUNK_BYTES = 1 << 20  # what made a plain aiohttp loop fastest


def fresh(size: int) -> memoryview:
    """Memory that was never touched."""
    return memoryview(np.empty(size, np.uint8))


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[sock.recv_into(view) :]


class RawSocket:
    """`sendmsg` and `recv_into` on a blocking TCP or Unix socket: the floor."""

    def __init__(self, family: int) -> None:
        self.family = family

    def serve(self, started) -> None:
        with socket.socket(self.family) as listener:
            listener.bind(("127.0.0.1", 0) if self.family == socket.AF_INET else tempfile.mktemp(prefix="bench-"))
            listener.listen()
            started(listener.getsockname())
            sock, _ = listener.accept()
        with sock:
            self._set(sock)
            while header := sock.recv(8, socket.MSG_WAITALL):
                view = fresh(int.from_bytes(header, "little"))
                receive_exactly(sock, view)
                self._send(sock, view)

    def connect(self, address) -> None:
        self.sock = socket.socket(self.family)
        self.sock.connect(address)
        self._set(self.sock)

    def exchange(self, data: memoryview) -> None:
        self._send(self.sock, data)
        view = fresh(int.from_bytes(self.sock.recv(8, socket.MSG_WAITALL), "little"))
        receive_exactly(self.sock, view)

    def close(self) -> None:
        self.sock.close()

    def _set(self, sock: socket.socket) -> None:
        if self.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, sock: socket.socket, view: memoryview) -> None:
        header = len(view).to_bytes(8, "little")
        sent = sock.sendmsg([header, view]) - len(header)
        sock.sendall(view[sent:])


class PlainAiohttp:
    """POST in chunks from a generator, read by chunks into memory of the right size; the answer likewise."""

    def __init__(self) -> None:
        self.done = threading.Event()

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
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started(runner.addresses[0][1])
        await asyncio.to_thread(self.done.wait)
        await runner.cleanup()

    def connect(self, port: int) -> None:
        from aiohttp import ClientSession

        self.loop = asyncio.new_event_loop()
        self.url = f"http://127.0.0.1:{port}/"

        async def open_session() -> ClientSession:
            return ClientSession(read_bufsize=CHUNK_BYTES)

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
    """Read what comes into `view`."""
    while len(view):
        data = await stream.readany()
        view[: len(data)] = data
        view = view[len(data) :]
