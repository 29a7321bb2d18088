"""Servers that mean harm: what a client believes them, and what it lets them do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

import attrs
import msgspec
import pytest

from djinn_client.runtime.connecting.handshake import Gateway, Server, direct_addresses, reach_gateway
from djinn_client.runtime.connecting.servers import find_servers
from djinn_client.runtime.receiving.failures import Failures
from djinn_client.runtime.receiving.reply_reader import ReplyReader
from djinn_core.errors import ConfigurationError, ProtocolError, TransportError
from djinn_core.hookspecs.transports import Frame, Limits, TlsOptions
from djinn_core.protocol.addresses import DIRECTORY_PREFIX, is_own_socket, transport_for
from djinn_core.protocol.net.tls_contexts import client_context, server_context
from djinn_core.protocol.tls_transports import transports_trusting, under_tls, with_tls
from djinn_core.settings import Settings
from djinn_core.wire.frames import FrameDecoder
from djinn_core.wire.messages import (
    Attach,
    Completed,
    DeviceInfo,
    ProtocolClose,
    Refused,
    TensorHeader,
    Timing,
    ValueDescription,
    Welcome,
    decode,
    encode,
)
from djinn_core.wire.peer_messages import ConnectPeer
from djinn_http.exchange import Endpoint, HttpExchange
from djinn_server.launch.self_signed import self_signed
from djinn_server.peers import exchange

CPU = DeviceInfo("cpu", "cpu")


def reachable_urls(transports, reached, *urls, fingerprint=""):
    listening = (reached.replace("gpu-box", "0.0.0.0"),)  # what a server says that it listens at
    welcome = Welcome("ticket", urls, "1", "2", CPU, gateway=listening, fingerprint=fingerprint)
    known = with_tls(transports, TlsOptions())
    return [url for url, _ in direct_addresses(Gateway(None, reached, welcome), known)]


def test_server_cannot_redirect_to_other_hosts(transports):
    elsewhere = ("tcp://10.0.0.1:22", "tcp://metadata.internal:80", "tcp://127.0.0.1:6379", "tcp://[::1", "nothing")
    found = reachable_urls(transports, "tcp://gpu-box:5556", *elsewhere)
    assert found == ["tcp://gpu-box:22", "tcp://gpu-box:80", "tcp://gpu-box:6379"]


def test_server_cannot_downgrade_tls(transports):
    assert reachable_urls(transports, "tcps://gpu-box:5556", "tcp://gpu-box:1", "tcps://gpu-box:2") == [
        "tcps://gpu-box:2"
    ]
    assert reachable_urls(transports, "tcp://gpu-box:5556", "tcp://gpu-box:1") == ["tcp://gpu-box:1"]


def test_other_host_needs_known_certificate(transports, tmp_path):
    """A certificate is known if the gateway named it over TLS or on its own machine, as for an engine's executors."""
    own = tmp_path / f"{DIRECTORY_PREFIX}x"
    own.mkdir(mode=0o700)
    urls = ("tcp://10.0.0.1:22", f"unix://{own}/executor.sock", "tcps://10.0.0.1:5000", "tcps://[::1", "nothing")
    pinned = "sha256:" + "0" * 64
    for gateway in ("tcps://gpu-box:5556", "tcp://127.0.0.1:5556"):
        assert reachable_urls(transports, gateway, *urls, fingerprint=pinned) == ["tcps://10.0.0.1:5000"]
    assert reachable_urls(transports, "tcp://gpu-box:5556", *urls, fingerprint=pinned) == []
    ways_there = transports_trusting(with_tls(transports, TlsOptions(fingerprints=("sha256:" + "1" * 64,))), pinned)
    (way,) = [transport for transport in ways_there if transport.schemes == ("tcps",)]
    with tcps_listener(transports, tmp_path) as url, pytest.raises(TransportError, match="certificate"):
        way.connect(url, Limits(), 10.0)


@contextlib.contextmanager
def tcps_listener(transports, tmp_path):
    """Yield the address of a listener whose certificate is unknown to the client."""
    made = self_signed(tmp_path / "tls")
    (tcps,) = [one for one in under_tls(transports, TlsOptions(made.certificate, made.key)) if "tcps" in one.schemes]
    listener = tcps.listen("tcps://127.0.0.1:0", Limits(), lambda connection: None)
    try:
        yield listener.url
    finally:
        listener.close()


def test_only_executor_sockets_are_followed(transports, tmp_path):
    own = tmp_path / f"{DIRECTORY_PREFIX}x"
    own.mkdir(mode=0o700)
    good = f"unix://{own}/executor.sock"
    others = (
        "unix:///var/run/docker.sock",
        f"unix://{own}/agent.sock",
        f"unix://{tmp_path}/executor.sock",
        "unix://x/y",
    )
    assert reachable_urls(transports, "tcp://127.0.0.1:5556", good, *others) == [good]
    assert reachable_urls(transports, "tcp://gpu-box:5556", good) == []  # another machine's
    own.chmod(0o755)
    assert not is_own_socket(good)


def test_executor_connects_to_executor_sockets_only(transports, tmp_path):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        met = exchange.PeerExchange(exchange.PeerListener(transports)).connect(
            ConnectPeer(1, 2, "ticket", (f"unix://{path}",))
        )
        assert "not the socket of an executor" in met.error
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("ticket", ["x\r\nFLUSHALL\r\n", "x\n", "GET / HTTP/1.1"])
def test_ticket_reveals_no_secret(ticket):
    for message in (Attach(ticket, ""), ConnectPeer(1, 2, ticket, ())):
        with pytest.raises(ProtocolError):
            decode(encode(message))


def test_control_characters_are_escaped():
    for kind in (Refused, ProtocolClose):
        (said,) = {decode(encode(kind("\x1b]0;owned\x07gone\x9b2J\u202e\nso there"))).reason}
        assert said == "\\x1b]0;owned\\x07gone\\x9b2J\\u202e\nso there"
    with pytest.raises(ProtocolError):
        decode(encode(Welcome("", (), "1\x1b[2J", "2", CPU)))
    assert len(decode(encode(Refused("a" * 1_000_000))).reason) < 40_000


def serve_bytes(answer):
    """Return the address of a listener that answers each connection with the bytes of `answer()`, repeatedly."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    sock.recv(65536)
                    while data := answer():
                        sock.sendall(data)
                except OSError:
                    continue

    threading.Thread(target=run, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    ("begin", "more", "says"),
    [
        (b"HTTP/1.1 201 Created\r\n", b"X: " + b"a" * 4000 + b"\r\n", "headers of the response have more"),
        (b"HTTP/1.1 201 Created\r\nX: ", b"a" * 4000, "headers of the response have more"),
    ],
)
def test_endless_http_response_is_bounded(transports, begin, more, says):
    parts = iter([begin])
    with serve_bytes(lambda: next(parts, more)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransportError, match=says):
            transport_for(url, transports).connect(url, Limits(), 0.5)


def test_endless_exchange_is_bounded():
    class Chatty(HttpExchange):
        waiting = True

        def read_some(self, deadline):
            return True

    endpoint = Endpoint("gpu-box", 5557, "")
    assert not Chatty(endpoint, FrameDecoder(Limits()), 1.0).read(time.monotonic() - 1)


def test_no_allocation_before_authentication(transports):
    def accept(connection):
        connection.send(Frame(encode(Refused("no")), [bytes(1 << 20)]))

    listener = transport_for("tcp://127.0.0.1:0", transports).listen("tcp://127.0.0.1:0", Limits(), accept)
    try:
        with pytest.raises(TransportError, match="exceeds the"):
            reach_gateway(Server((listener.url,), "t" * 32, tuple(transports), 10.0), "")
    finally:
        listener.close()


@pytest.mark.parametrize(
    "described",
    [
        ValueDescription("float32", (2, 3), (1,), 0),
        ValueDescription("float32", (-1,), (1,), 0),
        ValueDescription("float32", (2**40, 2**40), (0, 0), 0),
        ValueDescription("float32", (2, 2), (2**63, 1), 0),
        ValueDescription("no_such_dtype", (1,), (1,), 0),
    ],
)
def test_invalid_descriptions_are_refused(described):
    with pytest.raises(ProtocolError):
        ReplyReader(Failures(), 1).described(Completed(1, described=(described,)))


def test_short_replies_are_refused():
    header = TensorHeader("float32", (2,), (1,))
    reader = ReplyReader(Failures(), 1)
    for results, body in (((header, header), [bytes(8)]), ((header,), [bytes(4)]), ((header,), [])):
        with pytest.raises(ProtocolError):
            reader.tensors(Completed(1, results=results), body)
    raw = msgspec.msgpack.decode(encode(Completed(1, timing=Timing(1.0))))
    (place,) = [n for n, part in enumerate(raw) if isinstance(part, list) and 1.0 in part]
    raw[place][0] = float("nan")
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(raw))


def test_tls_has_forward_secrecy(tls):
    for context in (server_context(tls), client_context(tls)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert all(cipher["aead"] and cipher["kea"] in {"kx-ecdhe", "kx-any"} for cipher in context.get_ciphers())


def test_pinned_certificate_requires_tls(transports):
    settings = Settings(servers=("tcp://gpu-box:5556",), token="t" * 32, tls_fingerprints=("sha256:" + "0" * 64,))
    with pytest.raises(ConfigurationError, match="has no TLS, but the setting"):
        find_servers(settings).transports(transports)
    for allowed in (
        attrs.evolve(settings, servers=("tcps://gpu-box:5556",)),
        attrs.evolve(settings, servers=("tcp://127.0.0.1:5556",)),
        attrs.evolve(settings, tls_fingerprints=()),
    ):
        assert find_servers(allowed).transports(transports)
