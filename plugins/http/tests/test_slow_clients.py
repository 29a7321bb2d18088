import socket
import threading

import pytest

from djinn.hooks import Frame, Limits
from djinn_http import HttpTransport, pace, server

SMALL = Limits(head=1000, body=0, buffers=0)
HEADERS = "POST /djinn/v1/{} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"


@pytest.fixture
def echo_url(monkeypatch):
    """Yield the URL of an echo server with a 0.5 s authentication timeout, checked every 0.1 s."""
    monkeypatch.setattr(pace, "UNAUTHENTICATED_SECONDS", 0.5)
    monkeypatch.setattr(server, "_SWEEP_SECONDS", 0.1)

    def accept(connection):
        connection.limits = Limits()
        while True:
            connection.send(connection.receive(60))

    listener = HttpTransport().listen("http://127.0.0.1:0", SMALL, accept)
    yield listener.url
    listener.close()


def send_bytewise(url, data, pause):
    """Send `data` one byte at a time until the server hangs up. Return the number of sent bytes."""
    host, port = url.removeprefix("http://").split(":")
    over = threading.Event()
    with socket.create_connection((host, int(port)), 300) as slow:
        sent = []

        def trickle():
            for byte in data:
                if over.wait(pause):
                    return
                try:
                    sent.append(slow.send(bytes([byte])))
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            while slow.recv(4096):
                pass
        except ConnectionResetError:
            pass
        over.set()
        thread.join()
        return len(sent)


@pytest.mark.parametrize(
    "data", [b"", HEADERS.format("open").encode() + b"X-Padding: " + b"x" * 1000], ids=["silent", "headers"]
)
def test_bytewise_sender_is_disconnected(echo_url, data):
    client = HttpTransport().connect(echo_url, Limits(), 5)
    assert send_bytewise(echo_url, data, 0.1) < max(len(data), 1)
    client.send(Frame(b"still served"))
    assert client.receive(60).head == b"still served"
    client.close()


def test_request_deadline_extends_with_progress():
    waited = pace.RequestTimeLimit()
    waited._since -= pace.UNAUTHENTICATED_SECONDS + 1
    assert waited.too_slow
    waited.count_received(5000)
    assert not waited.too_slow
    waited.response_sent()
    assert not waited.too_slow
