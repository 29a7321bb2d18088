"""Byte counts of `djinn.stats()` equal what went over the wire, to the byte."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
import torch

import djinn

REMOTE = "remote_accelerator:0"


class Relay:
    """A relay between client and server that forwards all bytes and counts them."""

    def __init__(self, url):
        parts = urlsplit(url)
        self.server = (parts.hostname, parts.port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{parts.scheme}://127.0.0.1:{self.listener.getsockname()[1]}"
        self.sent = self.received = 0
        self.counting = threading.Lock()
        self.sockets = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.server)
            self.sockets += [client, server]
            threading.Thread(target=self.copy, args=(client, server, "sent"), daemon=True).start()
            threading.Thread(target=self.copy, args=(server, client, "received"), daemon=True).start()

    def copy(self, source, target, name):
        with contextlib.suppress(OSError):  # one end hung up
            while data := source.recv(1 << 20):
                with self.counting:  # before it is passed on, so that what has arrived has been counted
                    setattr(self, name, getattr(self, name) + len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for one in self.sockets:
            one.close()


@pytest.fixture(params=["tcp", "http"])
def relay(request, connect, url_of):
    relay = Relay(url_of(request.param))
    with connect(relay.url):
        yield relay
    relay.close()


def settled_counters(relay):
    """Return the client's counters once they agree with the relay's, or after 60 seconds."""
    deadline = time.monotonic() + 60.0
    while True:
        stats = djinn.stats()
        if (stats["bytes_sent"], stats["bytes_received"]) == (relay.sent, relay.received):
            return stats
        if time.monotonic() > deadline:
            return stats
        time.sleep(0.02)


def test_byte_counts_equal_socket_traffic(relay):
    weight = torch.randn(300, 1000)
    remote = weight.to(REMOTE)
    result = (remote @ remote.T).relu()
    torch.testing.assert_close(result.cpu(), (weight @ weight.T).relu(), rtol=1e-4, atol=1e-3)
    for _ in range(5):
        result = result * 0.5
        result.sum().item()
    stats = settled_counters(relay)
    assert (stats["bytes_sent"], stats["bytes_received"]) == (relay.sent, relay.received)
    assert stats["bytes_uploaded"] == weight.nbytes
    assert weight.nbytes < stats["bytes_sent"] < weight.nbytes + 32_000
    assert 300 * 300 * 4 < stats["bytes_received"] < 300 * 300 * 4 + 32_000
