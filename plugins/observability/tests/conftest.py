"""A server with an operations listener and tokens of two tenants."""

from __future__ import annotations

import re
import subprocess
import sys

import attrs
import pytest
from servers import Server, start_server


@attrs.frozen
class Guarded:
    """A server, the URL of its operations listener, and the tokens of tenants that `djinn token` made."""

    server: Server
    operations: str
    tokens: dict[str, str]

    @property
    def operator(self) -> str:
        return self.server.token


def make_token(file, *arguments) -> str:
    command = [sys.executable, "-m", "djinn_core.cli", "token", "create", *arguments, "--file", file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def start_guarded(python, plain_environment):
    """Return a function that starts a guarded server.

    `port`: port of the operations listener, or 0 for any free port.
    """

    started = []

    def start(folder, *options, port=0):
        file = folder / "tokens.json"
        made = {name: make_token(file, name) for name in ("alice", "bob")} if not file.exists() else {}
        options = ("--threads", "1", "--store-gib", "0", "--drain-seconds", "1", "--token-file", str(file), *options)
        server = start_server(python.start, folder, *options, "--operations-port", str(port), env=plain_environment)
        started.append(server)
        return Guarded(server, _address(server.log.read_text()), made)

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()


def _address(log: str) -> str:
    found = re.search(r"Operations at (\S+):", log)
    assert found is not None, log
    return found[1]
