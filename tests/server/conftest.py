from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from djinn_core.builtins import builtin_plugins
from djinn_core.config import Settings
from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.launch.addresses import transport_for
from djinn_core.launch.process import ExecutorProcess
from djinn_core.plugins.registry import Registry, Selection, load_registry
from djinn_core.wire.message import Message
from djinn_core.wire.messages import decode, encode

SECONDS = 60.0


@attrs.frozen
class Server:
    """A `djinn serve` of its own process."""

    process: subprocess.Popen[bytes]
    file: Path
    log: Path

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(json.loads(self.file.read_text())["urls"])

    @property
    def token(self) -> str:
        return json.loads(self.file.read_text())["token"]

    def url(self, scheme: str) -> str:
        return next(url for url in self.urls if url.startswith(f"{scheme}://"))

    def settings(self, **others: object) -> Settings:
        return Settings(connection_file=self.file, **others)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` is true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {SECONDS} s"
        time.sleep(0.02)


def start_server(directory: Path, *arguments: str) -> Server:
    file, log = directory / "connection.json", directory / "log"
    command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file), "--device", "cpu"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output, env=clean_environment())
    server = Server(process, file, log)
    wait_for(lambda: file.exists() or process.poll() is not None, "the connection file")
    assert process.poll() is None, log.read_text()
    return server


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    return kept | {"DJINN_CONFIG": os.devnull, "OMP_NUM_THREADS": "1"}


def exists(process: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ask(connection: Connection, message: Message) -> object:
    connection.send(Frame(encode(message)))
    return decode(connection.receive(SECONDS).head)


@pytest.fixture(name="wait_for", scope="session")
def _wait_for():
    return wait_for


@pytest.fixture(name="exists", scope="session")
def _exists():
    return exists


@pytest.fixture(name="ask", scope="session")
def _ask():
    return ask


@pytest.fixture(scope="session")
def environment():
    return clean_environment()


@pytest.fixture(autouse=True)
def _no_settings_of_the_person(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DJINN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DJINN_CONFIG", os.devnull)


@pytest.fixture(scope="session")
def registry() -> Registry:
    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"})


@pytest.fixture
def dial(registry):
    dialled: list[Connection] = []

    def connect(url: str) -> Connection:
        dialled.append(transport_for(url, registry.transports).connect(url, Limits(), SECONDS))
        return dialled[-1]

    yield connect
    for connection in dialled:
        connection.close()


@pytest.fixture(scope="session")
def executor():
    with ExecutorProcess.start("cpu", host="127.0.0.1", threads=1, timeout=SECONDS) as executor:
        yield executor


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("server"))
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def own_server(tmp_path):
    servers = []

    def start(*arguments: str) -> Server:
        servers.append(start_server(tmp_path, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def keeping(tmp_path_factory):
    """`remote_accelerator` is a server that keeps weights, and has some; gives a safetensors file that it knows."""
    import torch
    from safetensors.torch import save_file

    import djinn

    folder = tmp_path_factory.mktemp("keeping")
    file = folder / "models" / "model.safetensors"
    file.parent.mkdir()
    save_file({f"{n}.weight": torch.randn(256, 256 + n) for n in range(8)}, file)
    options = ["--store", str(folder / "weights"), "--warm", str(file.parent), "--threads", "1", "--drain-seconds", "1"]
    server = start_server(folder, *options)
    wait_for(lambda: "weights on this machine were read" in server.log.read_text(), "the files were not read")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DJINN_")]:
            patch.delenv(name)
        patch.setenv("DJINN_CONFIG", os.devnull)
        djinn.configure(servers=[server.url("tcp")], token=server.token, disable=("local",))
        djinn.init()
        yield file
        djinn.configure()
    server.stop()
