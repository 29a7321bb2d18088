import socket
import threading
import time

import pytest

from djinn.transports import Frame, Limits
from djinn_http import HttpTransport, pace, server

SMALL = Limits(head=1000, body=0, buffers=0)
HEADERS = "POST /djinn/v1/{} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"


@pytest.fixture
def listening(monkeypatch):
    """A server that waits for half a second in place of six, and looks ten times a second; echoes what trusted clients send."""
    monkeypatch.setattr(pace, "STRANGER_SECONDS", 0.5)
    monkeypatch.setattr(server, "_SWEEP_SECONDS", 0.1)

    def accept(connection):
        connection.limits = Limits()
        while True:
            connection.send(connection.receive(10))

    listener = HttpTransport().listen("http://127.0.0.1:0", SMALL, accept)
    yield listener.url
    listener.close()


def closed_after(url, data, pause):
    """Seconds until the server hangs up on a client that sends `data` a byte at a time."""
    host, port = url.removeprefix("http://").split(":")
    over = threading.Event()
    with socket.create_connection((host, int(port)), 10) as slow:
        began = time.monotonic()

        def trickle():
            for byte in data:
                if over.wait(pause):
                    return
                try:
                    slow.send(bytes([byte]))
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
        return time.monotonic() - began


@pytest.mark.parametrize("data", [b"", HEADERS.format("open").encode()], ids=["silent", "headers"])
def test_who_sends_a_byte_at_a_time_is_hung_up_on(listening, data):
    client = HttpTransport().connect(listening, Limits(), 5)
    assert closed_after(listening, data, 0.1) < 8
    client.send(Frame(b"still served"))
    assert client.receive(10).head == b"still served"
    client.close()


def test_a_request_gains_time_by_sending_on():
    waited = pace.Pace()
    waited._since -= pace.STRANGER_SECONDS + 1
    assert waited.too_slow
    waited.came(5000)
    assert not waited.too_slow
    waited.over()
    assert not waited.too_slow
