"""A `djinn serve` process for an evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs

from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file

SECONDS = 600.0  # timeout for start and end on a busy machine


@attrs.frozen
class Server:
    """A running server: its process, its folder, and its URLs."""

    process: Any  # like a `subprocess.Popen`
    folder: Path
    connection: ConnectionFile

    @property
    def file(self) -> Path:
        """Return the connection file."""
        return self.folder / "connection.json"

    @property
    def log(self) -> str:
        """Return the server's output."""
        return (self.folder / "log").read_text(errors="replace")

    @property
    def token(self) -> str:
        """Return the server's token."""
        return self.connection.token

    @property
    def urls(self) -> dict[str, str]:
        """Return the server's first URL of each scheme, by scheme."""
        return {urlsplit(url).scheme: url for url in reversed(self.connection.urls)}

    @property
    def tcp(self) -> str:
        """Return the server's URL over TCP."""
        return self.urls["tcp"]

    def stop(self) -> int:
        """End the server. Return its exit status."""
        self.process.terminate()
        status: int = self.process.wait(SECONDS)
        return status


def plain_environment(**more: str) -> dict[str, str]:
    """Return environment variables of a single-threaded process, without Djinn settings except those in `more`."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    own = {"DJINN_CONFIG": os.devnull, "DJINN_START_TIMEOUT": f"{SECONDS:g}", "OMP_NUM_THREADS": "1"}
    return variables | own | {"HF_HUB_OFFLINE": "1"} | more


def start_server(
    folder: Path,
    *options: str,
    device: str = "cpu",
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    start: Callable[..., Any] | None = None,
) -> Server:
    """Start a server that drains for at most a second, and wait until it listens.

    The server's log is `folder/log`. Its environment is `plain_environment()` with `environment`. `prefix`: command prefix.
    `start`: function that starts a process as `subprocess.Popen` does, given the arguments of `python`, or None.

    Raises:
        RuntimeError: the server ended, or does not listen after `SECONDS`. The message is its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "connection.json"
    file.unlink(missing_ok=True)
    command = ["-m", "djinn_core.cli", "serve", "--connection-file", str(file)]
    command += ["--device", device, "--threads", str(threads), "--drain-seconds", "1", *options]
    variables = plain_environment(OMP_NUM_THREADS=str(threads)) | dict(environment or {})
    with (folder / "log").open("ab") as log:
        if start is None:
            process = subprocess.Popen([*prefix, sys.executable, *command], stdout=log, stderr=log, env=variables)
        else:
            process = start(*command, stdout=log, stderr=log, env=variables)
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the server did not start:\n{(folder / 'log').read_text(errors='replace')}")
        time.sleep(0.02)
    return Server(process, folder, read_connection_file(file))


@contextmanager
def served(
    *options: str,
    folder: Path | None = None,
    device: str = "cpu",
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    start: Callable[..., Any] | None = None,
) -> Iterator[Server]:
    """Run a server as `start_server` does, during the block. Without `folder`, use a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        server = start_server(
            folder or Path(temporary),
            *options,
            device=device,
            threads=threads,
            environment=environment,
            prefix=prefix,
            start=start,
        )
        try:
            yield server
        finally:
            server.stop()
