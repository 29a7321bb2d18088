"""A `djinn serve` in a process of its own, and this process as its client over TCP."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import djinn
from djinn_core.protocol.connection_file import read_connection_file

START_SECONDS = 300.0


@contextlib.contextmanager
def serving(*options: str, device: str = "cpu") -> Iterator[Path]:
    """`remote_accelerator` is a server's, one thread on either side, as long as the context lasts; gives its connection file."""
    torch.set_num_threads(1)
    os.environ |= {"DJINN_CONFIG": os.devnull, "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "connection.json", Path(folder) / "log"
        command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file)]
        with log.open("wb") as output:
            command += ["--device", device, "--threads", "1", "--drain-seconds", "1", *options]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_for(file, process, log)
            connection = read_connection_file(file)
            url = next(url for url in connection.urls if url.startswith("tcp://"))
            # On one machine the built-in transport `local` would be faster, and taken.
            djinn.shut_down()
            djinn.configure(servers=[url], token=connection.token, disable=("local",))
            djinn.init()
            yield file
        finally:
            djinn.shut_down()
            process.terminate()
            process.wait(START_SECONDS)


def _wait_for(file: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.02)
