"""A `djinn serve` or an executor in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from djinn_core.settings import Settings
from djinn_server.launch.executor_config import ExecutorConfig, NetworkConfig
from djinn_server.launch.listen_addresses import ListenAddresses
from djinn_server.launch.process import ExecutorProcess

SECONDS = 300.0
DEVICE = os.environ.get("SERVED_DEVICE", "cpu")  # on which the tests' servers and executors compute, such as `fakegpu`


@attrs.frozen
class Server:
    """A running server: its process, its connection file and its log."""

    process: Any  # what `subprocess.Popen` is
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
        """Stop the server without a long drain. Return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` is true. `what`: the condition in words, for the error."""
    began, looks = time.monotonic(), 1
    while not (last := condition()):
        waited = time.monotonic() - began
        assert waited < SECONDS, (
            f"{what}: not after {waited:.0f} s, in which it was asked {looks} times; last value: {last!r}"
        )
        time.sleep(0.02)
        looks += 1


def fresh_python(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start `python` as users do. The fixture `python` is faster."""
    return subprocess.Popen([sys.executable, *map(str, arguments)], **options)


def start_server(start: Callable[..., Any], folder: Path, *options: str, env: dict[str, str]) -> Server:
    """Start `djinn serve` and wait until it listens.

    `start`: `fresh_python`, `python.start` of the fixture, or the fixture `start_python`.
    """
    file = folder / "connection.json"
    command = ["-m", "djinn_core.cli", "serve", "--connection-file", file, "--device", DEVICE, *options]
    return started_server(start, command, folder, env)


def started_server(start: Callable[..., Any], command: list[object], folder: Path, env: dict[str, str]) -> Server:
    """Return the server that a command starts, once it has printed its addresses."""
    file, log = folder / "connection.json", folder / "log"
    with log.open("wb") as output:
        process = start(*command, stdout=output, stderr=output, env=env)
    wait_for(lambda: "Clients on this machine" in log.read_text() or process.poll() is not None, "the announcement")
    assert process.poll() is None, log.read_text()
    return Server(process, file, log)


def start_executor(host: str = "", threads: int | None = None, device: str = DEVICE) -> ExecutorProcess:
    """Start an executor process and wait until it is ready. `host`: listen address for other machines, or ""."""
    network = NetworkConfig(ListenAddresses(host)) if host else None
    executor = ExecutorProcess(ExecutorConfig(device, network, threads))
    executor.wait_ready(SECONDS)
    return executor
