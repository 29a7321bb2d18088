"""A transport whose connections use UCX from the first frame, as they do after the first large buffers."""

from __future__ import annotations

import time
from contextlib import suppress

from djinn.hooks import Frame, Transport
from djinn_ucx import UcxTransport

SECONDS = 240.0
LARGE = bytes(1 << 20)


def warm_up(connection, client):
    """Exchange large buffers until both ends have offered UCX."""
    deadline = time.monotonic() + SECONDS
    said = False
    if client:
        connection.send(Frame(b"", [LARGE]))
    connection.receive(SECONDS)
    if not client:
        connection.send(Frame(b"", [LARGE]))
    while not connection.over_ucx:
        assert time.monotonic() < deadline
        with suppress(TimeoutError):
            said = connection.receive(0.02).head == b"warm"
    # The other end answers after it has received this end's offer.
    connection.send(Frame(b"warm"))
    assert said or connection.receive(SECONDS).head == b"warm"
    return connection


class WarmTransport(Transport):
    """A transport whose connections already use UCX."""

    def __init__(self, transport):
        self._transport = transport
        self.name, self.schemes = transport.name, transport.schemes
        self.capabilities = transport.capabilities

    def connect(self, url, limits, timeout):
        return warm_up(self._transport.connect(url, limits, timeout), client=True)

    def listen(self, url, limits, accept):
        return self._transport.listen(url, limits, lambda connection: accept(warm_up(connection, client=False)))

    def over_tls(self, tls):
        return WarmTransport(self._transport.over_tls(tls))


def warm_ucx():
    return WarmTransport(UcxTransport(bulk_bytes=192 << 10))
