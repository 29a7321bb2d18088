from __future__ import annotations

import socket
import time

import pytest

from djinn.testing import self_signed_tls
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection


@pytest.fixture(scope="session")
def transports():
    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    return self_signed_tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(name="closes", scope="session")
def _closes():
    """Return a function that returns True if the peer closes the connection within five minutes."""

    def closes(sock):
        sock.settimeout(300)
        try:
            while sock.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    return closes


@pytest.fixture
def dial():
    """Return a function that opens plain connections to the host and port of a URL. The test's end closes them."""
    dialled = []

    def connect(url):
        host, port = url.rpartition("//")[2].split(":")
        dialled.append(socket.create_connection((host, int(port)), 300))
        return dialled[-1]

    yield connect
    for sock in dialled:
        sock.close()


@pytest.fixture(name="wait_for", scope="session")
def _wait_for():
    def wait_for(condition, what):
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)

    return wait_for
