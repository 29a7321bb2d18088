"""A server process of its own for a benchmark, reached over loopback TCP, with one thread as the local reference."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import djinn
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file, write_connection_file

START_SECONDS = 300.0
Way = Callable[[str], AbstractContextManager[str]]


@contextmanager
def server(
    *arguments: str,
    device: str = "cpu",
    threads: int = 1,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ConnectionFile]:
    """Run `djinn serve` as long as the block lasts; gives its address. `prefix` is put before its command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "connection.json"
        command = [*prefix, sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file)]
        command += ["--device", device, "--threads", str(threads), "--drain-seconds", "1", *arguments]
        variables = os.environ | {"OMP_NUM_THREADS": str(threads)} | (environment or {})
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server did not start: try `djinn doctor`")
                time.sleep(0.02)
            yield read_connection_file(file)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def connected(
    *arguments: str,
    threads: int = 1,
    by: Way = nullcontext,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[None]:
    """`remote_accelerator` is a server of its own over TCP, as long as the block lasts.

    `by` gives, for the server's URL, one that leads there by another way, such as a slow link. `environment` is the server's,
    `settings` are this process's.
    """
    options = ("--store-gib", "0", *arguments)
    with server(*options, threads=threads, environment=environment) as serving, by(url_of(serving)) as url:
        djinn.shut_down()
        djinn.configure(servers=[url], token=serving.token, disable=("local",), **settings)
        try:
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


@contextmanager
def connected_by_file(
    *arguments: str, device: str = "cpu", environment: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A server, and this process as its client, as long as the block lasts; gives a connection file of it, for commands."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server(*arguments, device=device, environment=environment) as serving,
    ):
        file = Path(folder) / "connection.json"
        write_connection_file(file, serving)
        djinn.shut_down()
        djinn.configure(servers=[url_of(serving)], token=serving.token)
        try:
            yield file
        finally:
            djinn.shut_down()
            djinn.configure()


def url_of(serving: ConnectionFile, scheme: str = "tcp") -> str:
    """The server's URL of this scheme."""
    return next(url for url in serving.urls if url.startswith(f"{scheme}://"))
