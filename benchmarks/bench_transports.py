"""Transports against a raw socket and plain aiohttp, in one run: 64 MiB one way with an acknowledgement, and ping-pong.

    python benchmarks/bench_transports.py [--json] [--rounds 7]

The server of each contestant is a process of its own. Times are in seconds; the best of several rounds counts for large
messages, the median for small ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time

import numpy as np

from djinn.transports import Frame, Limits
from djinn_core.builtins.local import LocalTransport
from djinn_http import HttpTransport
from djinn_tcp import TcpTransport

LARGE_BYTES = 64 << 20
SMALL_BYTES = 64
PINGS = 2000
LIMITS = Limits()


def receive_exactly(sock, view):
    while len(view):
        view = view[sock.recv_into(view) :]


class RawSocket:
    """`sendall` and `recv_into` on a TCP or Unix socket: the floor."""

    def __init__(self, family):
        self.family = family

    def serve(self, started):
        listener = socket.socket(self.family)
        address = ("127.0.0.1", 0) if self.family == socket.AF_INET else tempfile.mktemp(prefix="bench-")
        listener.bind(address)
        listener.listen()
        started.put(listener.getsockname())
        sock, _ = listener.accept()
        small = memoryview(bytearray(SMALL_BYTES))
        while True:
            size = sock.recv(8, socket.MSG_WAITALL)
            if not size:
                return
            view = memoryview(np.empty(int.from_bytes(size, "little"), np.uint8))
            receive_exactly(sock, view)
            sock.sendall(small)

    def connect(self, address):
        self.sock = socket.socket(self.family)
        self.sock.connect(address)
        if self.family == socket.AF_INET:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.small = memoryview(bytearray(SMALL_BYTES))

    def exchange(self, data):
        self.sock.sendmsg([len(data).to_bytes(8, "little"), data])
        receive_exactly(self.sock, self.small)

    def close(self):
        self.sock.close()


class OverTransport:
    """A transport of ours."""

    def __init__(self, transport, url):
        self.transport, self.url = transport, url

    def serve(self, started):
        def accept(connection):
            small = bytes(SMALL_BYTES)
            while True:
                connection.receive()
                connection.send(Frame(small))

        started.put(self.transport.listen(self.url, LIMITS, accept).url)
        threading.Event().wait()

    def connect(self, address):
        self.connection = self.transport.connect(address, LIMITS, 10)

    def exchange(self, data):
        self.connection.send(Frame(data) if len(data) == SMALL_BYTES else Frame(b"", [data]))
        self.connection.receive()

    def close(self):
        self.connection.close()


class PlainAiohttp:
    """What one would write first: POST the bytes, `await request.read()`."""

    def serve(self, started):
        from aiohttp import web

        async def handle(request):
            await request.read()
            return web.Response(body=bytes(SMALL_BYTES))

        async def run():
            app = web.Application(client_max_size=1 << 30)
            app.router.add_post("/", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            started.put(runner.addresses[0][1])
            await asyncio.Event().wait()

        asyncio.run(run())

    def connect(self, port):
        from aiohttp import ClientSession

        self.loop = asyncio.new_event_loop()
        self.url = f"http://127.0.0.1:{port}/"

        async def open_session():
            return ClientSession()

        self.session = self.loop.run_until_complete(open_session())

    def exchange(self, data):
        async def post():
            async with self.session.post(self.url, data=data) as response:
                await response.read()

        self.loop.run_until_complete(post())

    def close(self):
        self.loop.run_until_complete(self.session.close())
        self.loop.close()


CONTESTANTS = {
    "raw tcp": lambda: RawSocket(socket.AF_INET),
    "djinn tcp": lambda: OverTransport(TcpTransport(), "tcp://127.0.0.1:0"),
    "raw unix": lambda: RawSocket(socket.AF_UNIX),
    "djinn local": lambda: OverTransport(LocalTransport(), f"unix://{tempfile.mkdtemp(prefix='bench-')}/s.sock"),
    "plain aiohttp": PlainAiohttp,
    "djinn http": lambda: OverTransport(HttpTransport(), "http://127.0.0.1:0"),
}


def measure(contestant, rounds):
    data = bytes(LARGE_BYTES)
    small = bytes(SMALL_BYTES)

    def timed(payload):
        start = time.perf_counter()
        contestant.exchange(payload)
        return time.perf_counter() - start

    for _ in range(PINGS // 10):
        timed(small)
    pings = [timed(small) for _ in range(PINGS)]
    timed(data)
    seconds = min(timed(data) for _ in range(rounds))
    return {
        "gigabytes_per_second": round(LARGE_BYTES / seconds / 1e9, 2),
        "round_trip_us": round(statistics.median(pings) * 1e6, 1),
        "round_trip_p90_us": round(statistics.quantiles(pings, n=10)[-1] * 1e6, 1),
    }


def run(name, rounds):
    contestant = CONTESTANTS[name]()
    context = multiprocessing.get_context("fork")
    started = context.Queue()
    server = context.Process(target=contestant.serve, args=(started,), daemon=True)
    server.start()
    contestant.connect(started.get(timeout=30))
    try:
        return measure(contestant, rounds)
    finally:
        contestant.close()
        server.kill()
        server.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7, help="large messages for each contestant")
    options = parser.parse_args()
    results = {name: run(name, options.rounds) for name in CONTESTANTS}
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()
        return
    print(f"{'':16}{'GB/s':>8}{'round trip us':>16}{'p90':>8}")
    for name, row in results.items():
        print(f"{name:16}{row['gigabytes_per_second']:8}{row['round_trip_us']:16}{row['round_trip_p90_us']:8}")


if __name__ == "__main__":
    main()
