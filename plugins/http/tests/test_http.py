"""Connections that are made of requests, as a proxy that forwards no upgrade leaves them, and as they are under TLS."""

import gc
import http.client
import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import wait_for

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Frame, Limits
from djinn_http import HttpTransport, dialect, pulse
from djinn_http.client import HttpConnection, open_channel, pieces
from djinn_http.exchange import Endpoint

LIMITS = Limits()


class HttpServer:
    def __init__(self, url="http://127.0.0.1:0", accept=None):
        self.connections = []
        self.clients = []
        self.arrived = threading.Semaphore(0)
        self.over = threading.Event()
        self.listener = HttpTransport().listen(url, LIMITS, accept or self.accept)

    def accept(self, connection):
        self.connections.append(connection)
        self.arrived.release()
        self.over.wait()

    def connect(self, url=""):
        host, port = (url or self.listener.url).removeprefix("http://").split(":")
        endpoint = Endpoint(host, int(port), "")
        client = HttpConnection(open_channel(endpoint, LIMITS, 10, "server"), endpoint, LIMITS, 10, "server")
        self.clients.append(client)
        assert self.arrived.acquire(timeout=60)
        return client, self.connections[-1]

    def close(self):
        self.over.set()
        for connection in (*self.clients, *self.connections):
            connection.close()
        self.listener.close()


@pytest.fixture
def http_server():
    http_server = HttpServer()
    yield http_server
    http_server.close()


def post(http_server, path, headers=(), body=b""):
    host, port = http_server.listener.url.removeprefix("http://").split(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=60)
    plain.request("POST", path, body, {"Content-Type": dialect.CONTENT_TYPE} | dict(headers))
    response = plain.getresponse()
    text = response.read().decode()
    plain.close()
    return response.status, text


def open_plain_channel(http_server):
    host, port = http_server.listener.url.removeprefix("http://").split(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=60)
    plain.request("POST", dialect.PATH + dialect.OPEN, b"", {"Content-Type": dialect.CONTENT_TYPE})
    response = plain.getresponse()
    response.read()
    plain.close()
    return response.getheader(dialect.CHANNEL)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/djinn/v1/open", {"Origin": "http://evil.example"}, 403),
        ("/djinn/v1/open", {"Origin": "null"}, 403),
        ("/djinn/v1/open", {"Sec-Fetch-Site": "same-origin"}, 403),
        ("/djinn/v1/open", {"Content-Type": "text/plain"}, 415),
        ("/djinn/v1/open", {"Host": "a b"}, 400),
        ("/", {}, 404),
        ("/djinn/v1/send", {}, 410),
        ("/djinn/v1/send", {"Djinn-Channel": "guess", "Djinn-Sequence": "0"}, 410),
    ],
)
def test_invalid_requests_are_refused(http_server, path, headers, status):
    assert post(http_server, path, headers)[0] == status
    assert not http_server.connections


def test_get_request_is_refused(http_server):
    host, port = http_server.listener.url.removeprefix("http://").split(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=60)
    plain.request("GET", dialect.PATH + dialect.OPEN)
    assert plain.getresponse().status == 405
    plain.close()


def test_channel_id_is_not_in_url():
    seen = []

    def listen(server):
        with server:
            sock, _ = server.accept()
            with sock:
                seen.append(sock.recv(4096))
                sock.sendall(b"HTTP/1.1 201 Created\r\nDjinn-Channel: secret\r\nContent-Length: 0\r\n\r\n")
                other, _ = server.accept()
                with other:
                    seen.append(other.recv(4096))
                    seen.append(sock.recv(4096))

    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listen, server)
        client = HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}/prefix", LIMITS, 10)
        client.send(Frame(b"hello"))
        listening.result(60)
        client.close()
    for request in seen:
        line, _, rest = request.partition(b"\r\n")
        assert line.startswith(b"POST /prefix/djinn/v1/")
        assert b"secret" not in line
        assert rest.lower().startswith(b"host: 127.0.0.1:")
    assert all(b"Djinn-Channel: secret" in request for request in seen[1:])


def test_channel_ids_are_long_and_unique(http_server):
    ids = {open_plain_channel(http_server) for _ in range(5)}
    assert len(ids) == 5
    assert all(len(channel) >= 32 for channel in ids)


@pytest.mark.parametrize("sequence", ["", "-1", "1e3", "99999999999999999999", "5000"])
def test_invalid_sequence_number_is_refused(http_server, sequence):
    client, server = http_server.connect()
    channel = server.id
    for action in ("send", "receive"):
        status, _ = post(http_server, dialect.PATH + action, {dialect.CHANNEL: channel, dialect.SEQUENCE: sequence})
        assert status in {400, 409}
    client.send(Frame(b"still fine"))
    assert server.receive(60).head == b"still fine"


def test_repeated_send_is_delivered_once(http_server):
    client, server = http_server.connect()
    client.send(Frame(b"once"))
    assert server.receive(60).head == b"once"
    status, _ = post(http_server, dialect.PATH + "send", {dialect.CHANNEL: server.id, dialect.SEQUENCE: "0"}, b"x" * 24)
    assert status == 409
    client.send(Frame(b"twice"))
    assert server.receive(60).head == b"twice"


def test_out_of_order_sends_are_reordered(http_server):
    channel = open_plain_channel(http_server)
    assert http_server.arrived.acquire(timeout=60)
    from djinn.hooks import encode_frame

    bodies = [b"".join(encode_frame(Frame(b"%d" % n), LIMITS)) for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = []
        for n in (2, 1, 0):
            headers = {dialect.CHANNEL: channel, dialect.SEQUENCE: str(n)}
            answers.append(pool.submit(post, http_server, dialect.PATH + "send", headers, bodies[n]))
            time.sleep(0.05)
        assert [answer.result(60)[0] for answer in answers] == [204] * 3
    assert [http_server.connections[0].receive(60).head for _ in range(3)] == [b"0", b"1", b"2"]


def test_broken_request_ends_channel(http_server):
    channel = open_plain_channel(http_server)
    assert http_server.arrived.acquire(timeout=60)
    host, port = http_server.listener.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(
            f"POST /djinn/v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: {dialect.CONTENT_TYPE}\r\n"
            f"{dialect.CHANNEL}: {channel}\r\n{dialect.SEQUENCE}: 0\r\nContent-Length: 1000\r\n\r\nDJNF".encode()
        )
        time.sleep(0.1)
    with pytest.raises(TransportError, match="middle of a frame"):
        http_server.connections[0].receive(60)


def test_receive_can_wait_longer_than_request_limit(http_server, monkeypatch):
    monkeypatch.setattr(dialect, "WAIT_SECONDS", 0.1)
    client, server = http_server.connect()
    with pytest.raises(TimeoutError):
        client.receive(0.5)
    server.send(Frame(b"at last"))
    assert client.receive(60).head == b"at last"


def test_busy_client_does_not_expire(http_server):
    client, server = http_server.connect()
    for _ in range(5):
        server._last_seen -= dialect.EXPIRY_SECONDS - 20
        client.pulse()  # what the thread does every few seconds
        wait_for(lambda: server.idle_seconds() < dialect.EXPIRY_SECONDS / 2, "the pulse")
    server.send(Frame(b"welcome back"))
    assert client.receive(60).head == b"welcome back"


def test_pulse_thread_does_not_keep_callback_alive(monkeypatch):
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.02)
    called = threading.Event()

    class Idle:
        def pulse(self):
            called.set()

    idle = Idle()
    monkeypatch.setattr(pulse, "_thread", None)
    pulse.keep_alive(idle)
    assert called.wait(60)
    import weakref

    gone = weakref.ref(idle)
    del idle
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_silent_client_expires(http_server, monkeypatch):
    monkeypatch.setattr(dialect, "EXPIRY_SECONDS", 0.5)
    open_plain_channel(http_server)
    assert http_server.arrived.acquire(timeout=60)
    with pytest.raises(TransportError, match="has sent nothing for"):
        http_server.connections[0].receive(60)


def test_killed_client_is_detected(http_server, monkeypatch, python, plain_environment):
    monkeypatch.setattr(dialect, "LINGER_SECONDS", 0.5)
    script = (
        "import sys; from djinn.hooks import Limits, Frame\n"
        "from djinn_http.client import HttpConnection, open_channel; from djinn_http.exchange import Endpoint\n"
        "where = Endpoint('127.0.0.1', int(sys.argv[1].rpartition(':')[2]), '')\n"
        "c = HttpConnection(open_channel(where, Limits(), 10, 's'), where, Limits(), 10, 's')\n"
        "c.send(Frame(b'here')); c.receive()"
    )
    process = python.start("-c", script, http_server.listener.url, env=plain_environment)
    try:
        assert http_server.arrived.acquire(timeout=60)
        assert http_server.connections[0].receive(60).head == b"here"
        process.send_signal(signal.SIGKILL)
        with pytest.raises(TransportError, match="has sent nothing for"):
            http_server.connections[0].receive(60)
    finally:
        process.kill()
        process.wait()


def test_broken_connection_is_reopened(http_server):
    client, server = http_server.connect()
    time.sleep(0.1)
    client._receive._socket.shutdown(socket.SHUT_RDWR)
    server.send(Frame(b"by another road"))
    assert client.receive(60).head == b"by another road"


def test_idle_connection_is_not_reused(http_server, monkeypatch):
    client, server = http_server.connect()
    client.send(Frame(b"1"))
    assert server.receive(60).head == b"1"
    before = client._sends[0]._socket
    monkeypatch.setattr("djinn_http.exchange.IDLE_SECONDS", 0.0)
    for n in range(2, 6):
        client.send(Frame(b"%d" % n))
        assert server.receive(60).head == b"%d" % n
    assert client._sends[0]._socket is not before


def test_pending_frames_at_server_are_bounded(http_server):
    client, _ = http_server.connect()
    sent = 0

    def flood():
        nonlocal sent
        for _ in range(200):
            client.send(Frame(b"", [bytes(1 << 20)]))
            sent += 1

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        held = -1
        while held < 8 or held != sent:  # until nothing more is taken
            held = sent
            time.sleep(0.5)
        assert 8 <= held < 60  # the inbox, and what sockets hold
        client.close()
        with pytest.raises(TransportError):
            flooding.result(60)


def test_close_frees_large_reply(http_server):
    client, server = http_server.connect()
    client.receive  # noqa: B018 - the client does not fetch anything
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: [server.send(Frame(b"", [bytes(16 << 20)])) for _ in range(4)])
        time.sleep(0.3)
        assert not first.done()
        server.close()
        with pytest.raises(TransportError):
            first.result(60)
    client.close()


def test_page_of_other_server_is_refused():
    def answer(server):
        with server:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found")

    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer, server)
        with pytest.raises(TransportError, match="HTTP 404: not found"):
            HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}", LIMITS, 10)


@pytest.mark.parametrize(
    "reply",
    [
        *(b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n"),
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_non_http_server_is_refused(reply):
    def answer(server):
        with server:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(reply)

    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer, server)
        with pytest.raises(TransportError, match="no Djinn server answers at"):
            HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}", LIMITS, 10)


@pytest.mark.parametrize(
    ("page", "told"), [(b"<html>\n<h1>No</h1></html>", "(?m)HTTP 403$"), (b"go\naway", "(?m)HTTP 403: go away$")]
)
def test_error_shows_reply_of_other_server_on_one_line(page, told):
    def answer(server):
        with server:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 403 No\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))

    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer, server)
        with pytest.raises(TransportError, match=told) as caught:
            HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}", LIMITS, 10)
    assert "\n" not in str(caught.value)


def test_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TransportError, match="no response in"):
        HttpTransport().connect(f"http://127.0.0.1:{server.getsockname()[1]}", LIMITS, 0.3)


@pytest.mark.parametrize("url", ["http://user:word@host:1", "http://", "http://host:99999", "http://h:1/?q=1"])
def test_malformed_addresses_are_refused(url):
    with pytest.raises(TransportError) as caught:
        HttpTransport().connect(url, LIMITS, 1)
    assert "word" not in str(caught.value) or "password" in str(caught.value)


def test_buffers_are_split_without_copying():
    buffers = [b"a" * 5, b"b" * 12, b"", b"c" * 3]
    cut = list(pieces(buffers, 8))
    assert [b"".join(piece) for piece in cut] == [b"aaaaabbb", b"bbbbbbbb", b"bccc"]
    assert cut[0][0].obj is buffers[0]


def test_forked_child_does_not_close_connection(http_server):
    client, server = http_server.connect()
    child = os.fork()
    if child == 0:
        try:
            client.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    client.send(Frame(b"parent"))
    assert server.receive(60).head == b"parent"


def test_listener_limits_hold_from_first_byte():
    failed = queue.SimpleQueue()

    def accept(connection):
        try:
            connection.receive(60)
        except ProtocolError as error:
            failed.put(str(error))
            raise

    listener = HttpTransport().listen("http://127.0.0.1:0", Limits(head=100, body=0, buffers=0), accept)
    try:
        client = HttpTransport().connect(listener.url, LIMITS, 10)
        client.send(Frame(bytes(101)))
        with pytest.raises(TransportError):
            client.receive(60)
        assert "exceeds the limits" in failed.get(timeout=60)  # the client may hear of it first
        client.close()
    finally:
        listener.close()
