"""This process as the client of a server of its own over TCP."""

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
    """`remote_accelerator` is a server's, one thread on either side, as long as the context lasts; gives its connection file."""
    torch.set_num_threads(1)
    os.environ |= {"DJINN_CONFIG": os.devnull, "TRANSFORMERS_VERBOSITY": "error"}
    with served(*options, device=device) as server:
        # On one machine the built-in transport `local` would be faster, and taken.
        djinn.shut_down()
        djinn.configure(servers=[server.tcp], token=server.token, disable=("local",))
        djinn.init()
        try:
            yield server.file
        finally:
            djinn.shut_down()
