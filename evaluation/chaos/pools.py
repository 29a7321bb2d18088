"""Two executors that exchange values: servers for them, and what to kill. Nearly every value travels (`round_robin`)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import djinn
from djinn.testing import open_connections
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_core.protocol.connection_file import read_connection_file

START_SECONDS = 120
KINDS = ("devices", "servers")  # two devices of one server, or two servers of one


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, str]]:
    """A server of its own: its TCP address and token."""
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "connection.json", folder / "log"
    command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file), "--threads", "1"]
    command += [
        "--state-dir",
        str(folder / "state"),
        "--store",
        str(folder / "store"),
        "--drain-seconds",
        "1",
        *options,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(log.read_text())
        time.sleep(0.05)
    found = read_connection_file(file)
    try:
        yield next(url for url in found.urls if url.startswith("tcp")), found.token
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@contextlib.contextmanager
def pool(kind: str, folder: Path, *options: str) -> Iterator[None]:
    """`remote_accelerator` is two executors."""
    with contextlib.ExitStack() as stack:
        if kind == "devices":
            both = ("--device", "cpu", "--device", "all", *options)
            url, token = stack.enter_context(serving(folder, *both))
            urls = [url]
        else:
            os.environ["DJINN_TOKEN"] = token = "the same for both of them, and long enough for it"
            stack.callback(os.environ.pop, "DJINN_TOKEN", None)
            one = ("--device", "cpu", *options)
            urls = [stack.enter_context(serving(folder / name, *one))[0] for name in ("first", "second")]
        settings = {"placement_policy": "round_robin", "disable": ("local", "recomputation"), "threads": 1}
        djinn.shut_down()
        djinn.configure(servers=urls, token=token, **settings)
        try:
            djinn.init()
            assert len(open_connections()) == 2
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


def executors() -> list[int]:
    """The processes of both executors, waiting for them."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = [status for status in ask_servers(client.settings()).values() if not isinstance(status, Exception)]
        ready = [one.process for status in found for one in status.executors if one.state == "ready"]
        if len(set(ready)) == 2:
            return sorted(set(ready))
        time.sleep(0.05)
    raise RuntimeError("two executors were not ready in time")


def victims(chance: random.Random) -> list[int]:
    """Executors that are killed: either one, or both."""
    both = executors()
    return chance.choice(([both[0]], [both[1]], both))


def kill(processes: list[int]) -> None:
    """Kill them at once."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
