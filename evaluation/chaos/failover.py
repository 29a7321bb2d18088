"""Servers that stand by for each other, and what to kill of them; an executor of this program's own."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
from free_ports import free_port

import djinn
from djinn.testing import executor_processes, open_connections
from djinn_client.runtime import client

START_SECONDS = 120
TOKEN = "the same for both of them, and long enough for it"


@attrs.define
class Server:
    """A server at a port of its own, which is started again after it was killed. It keeps nothing."""

    folder: Path
    port: int = attrs.field(factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL at which the server listens."""
        return f"tcp://127.0.0.1:{self.port}"

    def run(self) -> int:
        """Start it unless it runs; its process."""
        if self.process is None or self.process.poll() is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            file, log = self.folder / "connection.json", self.folder / "log"
            file.unlink(missing_ok=True)
            command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file)]
            command += ["--device", "cpu", "--threads", "1", "--port", str(self.port), "--store-gib", "0"]
            command += ["--drain-seconds", "0"]
            with log.open("ab") as output:
                environment = os.environ | {"DJINN_TOKEN": TOKEN}
                self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            deadline = time.monotonic() + START_SECONDS
            while not file.exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text())
                time.sleep(0.05)
        return self.process.pid

    def end(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(START_SECONDS)


@attrs.define
class Pair:
    """Two servers, of which one has the session and the other one stands by."""

    servers: tuple[Server, Server]

    def victims(self, _: random.Random) -> list[int]:
        """The server that has the session, with its executor; both servers run."""
        running = {server.url: server.run() for server in self.servers}
        (only,) = open_connections()
        return [running[only.connection.server], only.process]


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """`remote_accelerator` is one of two servers."""
    servers = Server(folder / "first"), Server(folder / "second")
    try:
        for server in servers:
            server.run()
        urls = [server.url for server in servers]
        djinn.shut_down()
        djinn.configure(
            servers=urls[:1], standby=urls[1:], standby_seconds=1, token=TOKEN, disable=("local",), threads=1
        )
        djinn.init()
        yield Pair(servers)
    finally:
        djinn.shut_down()
        djinn.configure()
        for server in servers:
            server.end()


@contextlib.contextmanager
def own(**settings: object) -> Iterator[None]:
    """`remote_accelerator` is an executor that this program starts for itself, or several by `settings`."""
    djinn.shut_down()
    djinn.configure(threads=1, **settings)
    try:
        djinn.init()
        yield
    finally:
        djinn.shut_down()
        djinn.configure()


def own_victims(_: random.Random) -> list[int]:
    """That executor."""
    return [client.executor_process()]


def some_of_own(chance: random.Random) -> list[int]:
    """One of several executors, or all of them."""
    every = executor_processes()
    return chance.choice([*([one] for one in every), [*every]])
