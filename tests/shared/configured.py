"""The device with settings of a test's own."""

from __future__ import annotations

import contextlib

import torch

import djinn


@contextlib.contextmanager
def configured(**settings):
    """`remote_accelerator` has these settings and one thread here, as it has there; afterwards none, and as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        djinn.configure(**settings)
        yield
    finally:
        djinn.configure()
        torch.set_num_threads(threads)
