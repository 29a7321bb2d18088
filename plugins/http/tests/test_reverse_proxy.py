"""Through an ordinary reverse proxy, one that buffers requests and knows nothing of us."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import ClientSession, web

from djinn.hooks import Frame, Limits
from djinn.testing import TransportConformance
from djinn_http import HttpTransport

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"}


class Proxy:
    """Map /gpu to the server like a web proxy.

    The proxy refuses bodies over 1 MiB, re-chunks replies, and hangs up after every 20th request.
    """

    def __init__(self, target, refuses_upgrades=False):
        self.target = target
        self.refuses_upgrades = refuses_upgrades
        self.paths = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def close(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(60)

    def _run(self):
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self):
        async with ClientSession(auto_decompress=False) as self._session:
            server = web.Server(self._pass_on, access_log=None)
            runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/gpu"
            self._ready.set()
            await self._over.wait()
            transports = [connection.transport for connection in server.connections]
            await runner.cleanup()
            for transport in transports:  # one with bytes that its peer does not read would stay open
                if transport is not None:
                    transport.abort()
            await asyncio.sleep(0)  # their ends are called back

    async def _pass_on(self, request):
        self.paths.append(request.raw_path)
        if (request.content_length or 0) > 1 << 20:
            return web.Response(status=413)
        if self.refuses_upgrades and "Upgrade" in request.headers:
            return web.Response(status=502)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP | {"host"}}
        url = self.target + request.path.removeprefix("/gpu")
        async with self._session.post(url, data=body, headers=headers | {"X-Forwarded-For": "192.0.2.1"}) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            if answer.status != 204:
                response.enable_chunked_encoding()
            if len(self.paths) % 20 == 0:
                response.force_close()
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


class ThroughProxy(HttpTransport):
    """The HTTP transport, with each client behind a proxy."""

    def __init__(self):
        self.proxies = {}

    def listen(self, url, limits, accept):
        listener = super().listen(url, limits, accept)
        self.proxies[listener.url] = Proxy(listener.url)
        return listener

    def connect(self, url, limits, timeout):
        return super().connect(self.proxies[url].url if url in self.proxies else url, limits, timeout)

    def close(self):
        for proxy in self.proxies.values():
            proxy.close()


class TestThroughProxy(TransportConformance):
    @pytest.fixture
    def transport(self):
        transport = ThroughProxy()
        yield transport
        transport.close()

    @pytest.fixture
    def listen_url(self):
        return "http://127.0.0.1:0"

    @pytest.fixture
    def wire(self):
        return False

    @pytest.mark.long  # without a proxy in between the suite has them
    def test_large_bodies(self, direction):
        super().test_large_bodies(direction)

    def test_a_closed_listener_refuses_and_frees_its_address(self):
        pytest.skip("the proxy keeps the address")

    def test_calls_in_any_order(self):
        pytest.skip("the proxy keeps the address, and descriptors")


def test_proxy_sees_no_secret():
    opened = threading.Event()
    connections = []

    def accept(connection):
        connections.append(connection)
        opened.set()
        connection.send(connection.receive(300))

    listener = HttpTransport().listen("http://127.0.0.1:0", Limits(), accept)
    proxy = Proxy(listener.url)
    try:
        client = HttpTransport().connect(proxy.url, Limits(), 10)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(client.send, Frame(b"x", [bytes(3 << 20)]))
            assert len(client.receive(300).body[0]) == 3 << 20
            sending.result()
        assert opened.is_set()
        assert not any(connections[0].id in path for path in proxy.paths)
        client.close()
    finally:
        proxy.close()
        listener.close()


def test_refused_upgrade_falls_back_to_requests():
    listener = HttpTransport().listen(
        "http://127.0.0.1:0", Limits(), lambda connection: connection.send(Frame(b"here"))
    )
    proxy = Proxy(listener.url, refuses_upgrades=True)
    try:
        client = HttpTransport().connect(proxy.url, Limits(), 10)
        assert client.receive(60).head == b"here"
        client.close()
    finally:
        proxy.close()
        listener.close()
