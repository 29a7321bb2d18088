"""Many who show nothing: they are few at every door, and none stays for long. Each of these once held threads or megabytes."""

from __future__ import annotations

import socket
import ssl
import threading
from types import SimpleNamespace

import pytest

from djinn.hooks import OperationsAddress, WatchedServer
from djinn_core.hookspecs.transports import Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.protocol.net.sockets import AcceptedConnection
from djinn_core.protocol.net.unauthenticated_limit import UnauthenticatedLimit
from djinn_core.protocol.tls_transports import under_tls
from djinn_http import pace
from djinn_http import server as http_server
from djinn_observability.dashboard import listener as operations_listener
from djinn_observability.dashboard.listener import OperationsListener
from djinn_observability.dashboard.routes import Operations
from djinn_server import attach
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.token_authenticator import Token, TokenAuthenticator
from djinn_server.shared_device import SharedDevice

SMALL = Limits(head=1000, body=0, buffers=0)


def test_stalled_handshake_is_evicted(transports, tls, dial, closes, monkeypatch):
    monkeypatch.setattr("djinn_tcp.transport._HANDSHAKE_SECONDS", 60.0)
    (secure,) = [way for way in under_tls(transports, tls) if way.name == "tcps"]
    listener = secure.listen("tcps://127.0.0.1:0", SMALL, lambda connection: None)
    listener._unauthenticated = UnauthenticatedLimit(2)
    try:
        oldest = dial(listener.url)
        others = [dial(listener.url) for _ in range(2)]
        assert closes(oldest)
        assert all(other.fileno() >= 0 for other in others)
    finally:
        listener.close()


def test_executor_bounds_unauthenticated_connections(monkeypatch, wait_for):
    limit = UnauthenticatedLimit(1)
    monkeypatch.setattr(attach, "ATTACH_SECONDS", 3600.0)
    context = ExecutorContext(SharedDevice(CpuRuntime()), unauthenticated=limit)
    pairs = [socket.socketpair() for _ in range(2)]
    ends = [AcceptedConnection(mine, SMALL, "client") for mine, _ in pairs]
    threads = [threading.Thread(target=attach.admit, args=(end, None, None, context)) for end in ends]
    threads[0].start()
    wait_for(lambda: len(limit) == 1, "the first one is not in")
    threads[1].start()
    threads[0].join(60)  # the second one came, so this one had to go before its hour was over
    assert not threads[0].is_alive()
    for _, theirs in pairs:
        theirs.close()
    for thread in threads:
        thread.join(60)
    for end in ends:
        end.close()


@pytest.fixture
def web(transports, monkeypatch):
    monkeypatch.setattr(http_server, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(pace, "UNAUTHENTICATED_SECONDS", 0.3)
    listener = transport_for("http://127.0.0.1:0", transports).listen(
        "http://127.0.0.1:0", SMALL, lambda connection: connection.receive(0.2)
    )
    yield listener
    listener.close()


HEAD = b"POST /djinn/v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", HEAD % b"send" + b"Content-Length: 0\r\n\r\n", b"\0\r\n"]
)
def test_refused_request_ends_connection(web, dial, closes, request_):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "UNAUTHENTICATED_SECONDS", 60.0)
        sock = dial(web.url)
        sock.sendall(request_)
        assert closes(sock)


def test_idle_unauthenticated_connection_is_closed(web, dial, closes):
    sock = dial(web.url)
    sock.sendall(HEAD % b"open" + b"Content-Length: 0\r\n\r\n")
    assert closes(sock)


def test_excess_http_connections_are_evicted(web, dial, closes, monkeypatch):
    monkeypatch.setattr(pace, "UNAUTHENTICATED_SECONDS", 60.0)
    monkeypatch.setattr(http_server, "_MAX_UNAUTHENTICATED", 2)
    oldest = dial(web.url)
    for _ in range(2):
        dial(web.url)
    assert closes(oldest)


def test_invalid_http_logs_one_line(web, dial, closes, caplog, wait_for):
    caplog.set_level("INFO")
    sock = dial(web.url)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX\x1b[2J: forged\r\n\r\n")
    assert closes(sock)
    wait_for(lambda: "not HTTP/1.1" in caplog.text, "nothing is logged")
    assert "Traceback" not in caplog.text
    assert "\x1b" not in caplog.text


@pytest.fixture
def watched_listener(tls, request):
    gatekeeper = Authentication(TokenAuthenticator(Token("t" * 32, "test")))
    server = WatchedServer(dict, lambda *_: "", lambda shown, _: gatekeeper.identify(shown))
    routes = Operations(server, SimpleNamespace(file=lambda path: None), lambda accept: (b"", ""))
    identity = tls if getattr(request, "param", "plain") == "tls" else None
    listener = OperationsListener(OperationsAddress("127.0.0.1", tls=identity), routes)
    yield listener
    listener.close()


@pytest.mark.parametrize("watched_listener", ["plain", "tls"], indirect=True)
def test_silent_operations_connection_is_closed(watched_listener, dial, closes, monkeypatch):
    monkeypatch.setattr(operations_listener, "REQUEST_SECONDS", 0.2)
    assert closes(dial(watched_listener.url))


@pytest.mark.parametrize("watched_listener", ["tls"], indirect=True)
def test_partial_handshake_is_closed(watched_listener, dial, closes, monkeypatch):
    monkeypatch.setattr(operations_listener, "REQUEST_SECONDS", 0.2)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    half = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    sock = dial(watched_listener.url)
    sock.sendall(outgoing.read()[:100])
    assert closes(sock)


def test_operations_listener_limits_header_bytes(watched_listener, dial):
    sock = dial(watched_listener.url)
    sock.sendall(
        b"GET /livez HTTP/1.0\r\nHost: localhost\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 4000) for n in range(5))
    )
    assert b" 431 " in sock.recv(200)


def test_excess_operations_connections_are_evicted(watched_listener, dial, closes, monkeypatch):
    monkeypatch.setattr(operations_listener, "REQUEST_SECONDS", 60.0)
    watched_listener._unauthenticated = UnauthenticatedLimit(2)
    oldest = dial(watched_listener.url)
    for _ in range(2):
        dial(watched_listener.url)
    assert closes(oldest)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"t" * 32 + b"\r\n\r\n", b" 200 "),
        (b"GET /livez HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer " + b"t" * 32 + b"\r\n\r\n", b" 200 "),
        (b"PUT /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", b" 405 "),
        (b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", b" 401 "),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 401 "),
        (b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n", b" 421 "),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX\x1b[2J: forged\r\n\r\n", b" 400 "),
    ],
)
def test_operations_listener_closes_after_one_reply(
    watched_listener, dial, closes, caplog, monkeypatch, request_, status
):
    monkeypatch.setattr(operations_listener, "REQUEST_SECONDS", 60.0)
    sock = dial(watched_listener.url)
    sock.sendall(request_)
    sock.settimeout(300)
    assert status in sock.recv(200)
    assert closes(sock)
    assert "Traceback" not in caplog.text
    assert "\x1b" not in caplog.text
