"""Files of a real web server under TLS. Tests select its replies."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import ipaddress
import json
import ssl
import threading
import time
from collections import Counter

import pytest
import torch
from aiohttp import web
from configured import configured
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save
from servers import start_server

import djinn
import djinn_weights.network_files
from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightPermissions
from djinn.testing import PluginConformance, WeightSourceConformance, open_permitted
from djinn_weights.network_files import HttpsSource, https, pieces


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_weights.network_files


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return a certificate for the loopback addresses, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return folder / "cert.pem", folder / "key.pem"


class Server:
    """A web server with files and with faults by path."""

    def __init__(self, certificate):
        self.files, self.how, self.requests = {}, {}, []
        self.connections, self.under_way, self.most_under_way = Counter(), 0, 0
        self._certificate = certificate
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(application)
        self._loop.run_until_complete(runner.setup())
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._certificate)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        self._loop.run_until_complete(site.start())
        self.port = site._server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def address(self, path, host="127.0.0.1"):
        return f"https://{host}:{self.port}/{path}"

    async def _answer(self, request):
        path = request.match_info["path"]
        self.requests.append(path)
        self.connections[request.transport] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._respond(request, path)
        finally:
            self.under_way -= 1

    async def _respond(self, request, path):
        how = self.how.get(path)
        if callable(how):
            how = how(len([one for one in self.requests if one == path]))
        if isinstance(how, int):
            return web.Response(status=how)
        if isinstance(how, str) and how.startswith("to "):
            return web.Response(status=302, headers={"Location": how[3:]})
        if path not in self.files:
            return web.Response(status=404)
        data = self.files[path]
        first, last = (int(part) for part in request.headers["Range"].removeprefix("bytes=").split("-"))
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:8]}"'}
        if how == "whole":
            return web.Response(body=data)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        if how == "other range":
            headers["Content-Range"] = f"bytes {first + 1}-{last + 1}/{len(data)}"
        elif how == "compressed":
            headers["Content-Encoding"] = "gzip"
        elif how == "long":
            part += bytes(1000)
        elif how in {"slow", "endless"}:
            answer = web.StreamResponse(status=206, headers=headers)
            await answer.prepare(request)
            while True:
                await answer.write(bytes(1 if how == "slow" else 1 << 20))
                await asyncio.sleep(0.05 if how == "slow" else 0)
        elif how == "pause":
            await asyncio.sleep(0.2)
        return web.Response(status=206, body=part, headers=headers)


@pytest.fixture(scope="module")
def running_server(certificate):
    server = Server(certificate)
    yield server
    server.stop()


@pytest.fixture
def server(running_server):
    (
        running_server.files.clear(),
        running_server.how.clear(),
        running_server.requests.clear(),
        running_server.connections.clear(),
    )
    running_server.most_under_way = 0
    return running_server


@pytest.fixture
def source(certificate, monkeypatch):
    monkeypatch.setattr(https, "_FIRST_DELAY", 0.01)
    return HttpsSource(ssl.create_default_context(cafile=certificate[0]))


@pytest.fixture
def permissions(server):
    return WeightPermissions(
        (), (f"https://127.0.0.1:{server.port}/models/*",), suffixes=(".safetensors", ".bin", ".index.json")
    )


class TestHttps(WeightSourceConformance):
    @pytest.fixture
    def source(self, source):
        return source

    @pytest.fixture
    def place(self, server, permissions):
        def place(data):
            server.files["models/model.safetensors"] = data
            return server.address("models/model.safetensors"), permissions

        return place


def read(file, start=0, size=None):
    data = bytearray(file.size - start if size is None else size)
    file.read_into(start, memoryview(data))
    return bytes(data)


def open_file(source, server, permissions, data, path="models/a.bin"):
    server.files[path] = data
    (file,) = open_permitted(source, server.address(path), permissions)
    return file


def test_long_reads_are_split_over_few_connections(source, server, permissions, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1000)
    data = bytes(torch.randint(0, 255, (100_500,), dtype=torch.uint8).tolist())
    file = open_file(source, server, permissions, data)
    server.how["models/a.bin"] = lambda number: "pause" if number < 20 else None
    assert read(file) == data
    assert len(server.requests) == 102
    assert server.most_under_way == pieces.READERS
    assert len(server.connections) <= pieces.READERS + 1
    assert read(file, 999, 2) == data[999:1001]


def test_index_lists_shards(source, server, permissions):
    for number in range(2):
        server.files[f"models/{number}.safetensors"] = save({f"{number}": torch.ones(2)})
    index = {"weight_map": {"0": "0.safetensors", "1": "1.safetensors"}}
    server.files["models/model.safetensors.index.json"] = json.dumps(index).encode()
    found = open_permitted(source, server.address("models/model.safetensors.index.json"), permissions)
    assert [file.name for file in found] == ["model.safetensors.index.json", "0.safetensors", "1.safetensors"]
    for names in (
        ["../0.safetensors"],
        ["https://elsewhere/a.bin"],
        ["//elsewhere/a.bin"],
        ["a?b"],
        ["%2e%2e"],
        [".."],
        ["."],
    ):
        server.files["models/x.bin.index.json"] = json.dumps({"weight_map": dict(enumerate(names))}).encode()
        with pytest.raises(WeightsUnavailable, match=r"shards, or one outside|not an index"):
            open_permitted(source, server.address("models/x.bin.index.json"), permissions)
    for text in (b"", b"[]", b"{}", b'{"weight_map": 1}', b"[" * 100_000):
        server.files["models/x.bin.index.json"] = text or b" "
        with pytest.raises(WeightsUnavailable, match="not an index"):
            open_permitted(source, server.address("models/x.bin.index.json"), permissions)


@pytest.mark.parametrize(
    "address",
    [
        "https://user:secret@127.0.0.1:{port}/models/a.bin",
        "https://user@127.0.0.1:{port}/models/a.bin",
        "https://127.0.0.1:{port}/models/../private/a.bin",
        "https://127.0.0.1:{port}/models/%2e%2e/private/a.bin",
        "https://127.0.0.1:{port}/models/./a.bin",
        "https://127.0.0.1:{port}?/models/a.bin",
        "https://127.0.0.1:{port}/models/a.bin#x",
        "https://127.0.0.1:{port}/private/a.bin",
        "https://localhost:{port}/models/a.bin",
        "https://127.0.0.1/models/a.bin",
        "https://127.0.0.1:99999/models/a.bin",
        "https://127.0.0.1:{port}\\@elsewhere/models/a.bin",
        "https://127.0.0.1:{port}/models/a b.bin",
        "https://127.0.0.1:{port}/models/a.html",
        "https://127.0.0.1:{port}/models/",
        "https:///models/a.bin",
        "https:127.0.0.1:{port}/models/a.bin",
        "http://127.0.0.1:{port}/models/a.bin",
        "https://[::1/models/a.bin",
        "https://127.0.0.1\u2100:{port}/models/a.bin",
        "",
    ],
)
def test_invalid_addresses_are_refused_without_request(source, server, permissions, address):
    server.files |= {"models/a.bin": b"1", "private/a.bin": b"1"}
    with pytest.raises(WeightsUnavailable):
        open_permitted(source, address.format(port=server.port), permissions)
    assert not server.requests


def test_permitted_redirects_are_followed(source, server, permissions):
    server.files |= {"models/b.bin": b"12345", "private/b.bin": b"secret"}
    server.how["models/a.bin"] = "to /models/b.bin"
    (file,) = open_permitted(source, server.address("models/a.bin"), permissions)
    assert (file.name, read(file)) == ("a.bin", b"12345")
    for target in (
        "/private/b.bin",
        "/models/../private/b.bin",
        "/models/%2e%2e/private/b.bin",
        server.address("models/b.bin", "localhost"),
        server.address("models/b.bin").replace("https", "http"),
        server.address("models/b.bin").replace("//", "//user:word@"),
        "file:///etc/passwd",
        "//169.254.169.254/latest",
        "",
    ):
        server.requests.clear()
        server.how["models/a.bin"] = f"to {target}"
        with pytest.raises(WeightsUnavailable, match="redirects to an address"):
            open_permitted(source, server.address("models/a.bin"), permissions)
        assert server.requests == ["models/a.bin"]
    server.how["models/a.bin"] = "to /models/a.bin"
    with pytest.raises(WeightsUnavailable, match="redirects more than"):
        open_permitted(source, server.address("models/a.bin"), permissions)


def test_expired_redirect_is_requested_again(source, server, permissions):
    server.files |= {"models/1.bin": b"12345", "models/2.bin": b"12345"}
    server.how["models/a.bin"] = "to /models/1.bin"
    (file,) = open_permitted(source, server.address("models/a.bin"), permissions)
    server.how |= {"models/1.bin": 403, "models/a.bin": "to /models/2.bin"}
    assert read(file) == b"12345"


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("whole", "does not support range requests"),
        ("other range", "did not return the requested range"),
        ("compressed", "compressed data"),
        ("long", "more than was requested"),
        ("endless", "more than was requested"),
        (404, "answers 404"),
        (401, "answers 401"),
        (503, "answers 503"),
    ],
)
def test_replies_without_range_are_refused(source, server, permissions, how, match):
    server.files["models/a.bin"] = bytes(100)
    server.how["models/a.bin"] = how
    with pytest.raises(WeightsUnavailable, match=match):
        open_permitted(source, server.address("models/a.bin"), permissions)
    assert len(server.requests) == (https.ATTEMPTS if how == 503 else 1)


def test_transient_server_failures_are_retried(source, server, permissions):
    file = open_file(source, server, permissions, bytes(100))
    server.how["models/a.bin"] = lambda number: 503 if number < 4 else None
    assert read(file) == bytes(100)


def test_slow_server_times_out(source, server, permissions, monkeypatch):
    file = open_file(source, server, permissions, bytes(100_000))
    monkeypatch.setattr(https, "TIMEOUT", 0.5)
    monkeypatch.setattr(https, "MIN_BYTES_PER_SECOND", 1_000_000)
    server.how["models/a.bin"] = "slow"
    started = time.monotonic()
    with pytest.raises(OSError, match="too slowly"):
        read(file)
    assert time.monotonic() - started < 5


def test_changed_file_is_detected(source, server, permissions):
    file = open_file(source, server, permissions, bytes(100))
    before = file.version()
    assert read(file, 10, 20) == bytes(20)
    assert file.version() == before
    server.files["models/a.bin"] = b"1" * 100
    with pytest.raises(OSError, match="has changed"):
        read(file, 10, 20)
    assert file.version() != before
    again = open_file(source, server, permissions, b"1" * 100)
    assert again.version() not in {before, file.version()}
    server.files["models/a.bin"] = b"1" * 99
    with pytest.raises(OSError, match="has changed"):
        read(again, 0, 1)


def test_untrusted_certificate_is_refused(server, permissions):
    server.files["models/a.bin"] = b"1"
    with pytest.raises(WeightsUnavailable, match="certificate"):
        HttpsSource().open(server.address("models/a.bin"), permissions)
    assert not server.requests


def test_executor_reads_model_over_https(server, certificate, python, plain_environment, tmp_path):
    tensors = {"a": torch.randn(100, 100), "b": torch.arange(5)}
    server.files["models/model.safetensors"] = save(tensors)
    allowed = f"https://127.0.0.1:{server.port}/models/*"
    environment = plain_environment | {"SSL_CERT_FILE": str(certificate[0])}
    started = start_server(python.start, tmp_path, "--threads", "1", "--allow-weights", allowed, env=environment)
    try:
        with configured(connection_file=started.file):
            weights = djinn.open_weights(server.address("models/model.safetensors"))
            for name, tensor in tensors.items():
                assert torch.equal(weights[name].cpu(), tensor)
            kept = weights.get_slice("a")
            server.files["models/model.safetensors"] = save({"a": torch.zeros(100, 100), "b": torch.arange(5)})
            with pytest.raises(djinn.errors.RemoteError, match="changed"):
                kept[3:5].cpu()
            with pytest.raises(djinn.errors.WeightsUnavailable, match="allow-weights"):
                djinn.open_weights(server.address("private/model.safetensors"))
    finally:
        started.stop()
