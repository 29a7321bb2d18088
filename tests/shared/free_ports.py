"""Ports for servers that tests start later, or again."""

from __future__ import annotations

import random
import socket

# Below those that Linux and other systems give to connections that name none: one of those may be taken meanwhile.
FIRST, LAST = 20_000, 25_000
_random = random.SystemRandom()  # tests and the processes that run them beside each other have seeds


def free_port() -> int:
    """Return a loopback port without a listener that the system assigns to no outgoing connection."""
    while True:
        port = _random.randint(FIRST, LAST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
