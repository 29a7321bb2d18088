"""A server of its own for runs under load: whatever is configured on this machine plays no part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

START_SECONDS = 60.0


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    return kept | {"DJINN_CONFIG": os.devnull, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A server with its log and caches in `folder`, and its URLs by scheme."""
    file, log = folder / "connection.json", folder / "log"
    command = [sys.executable, "-m", "djinn_core.cli", "serve", "--device", "cpu", "--threads", "1"]
    command += ["--drain-seconds", "1", "--connection-file", str(file), *arguments]
    with log.open("wb") as output:
        own = environment(XDG_CACHE_HOME=str(folder / "cache"))
        process = subprocess.Popen(command, stdout=output, stderr=output, env=own)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()}")
            time.sleep(0.02)
        yield process, {urlsplit(url).scheme: url for url in json.loads(file.read_text())["urls"]}
    finally:
        process.terminate()
        process.wait(60)
