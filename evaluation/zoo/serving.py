"""This process as the client of a server over TCP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

import djinn
from evaluation.served import served


@contextlib.contextmanager
def serving(*options: str, device: str = "cpu") -> Iterator[Path]:
    """Run a server as `remote_accelerator`, one thread on either side. Yield its connection file."""
    torch.set_num_threads(1)
    os.environ |= {"DJINN_CONFIG": os.devnull, "TRANSFORMERS_VERBOSITY": "error"}
    with served(*options, device=device) as server:
        # On one machine the faster transport `local` would be used.
        djinn.shut_down()
        djinn.configure(servers=[server.tcp], token=server.token, disable=("local",))
        djinn.init()
        try:
            yield server.file
        finally:
            djinn.shut_down()
