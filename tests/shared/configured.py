"""The device with settings of a test's own."""

from __future__ import annotations

import contextlib

import torch

import djinn


def configure_anew(**settings):
    """Let the next session have only these settings. End an open session with all its values."""
    from djinn_client.runtime import client

    djinn.shut_down()
    client.context.overrides = {}  # as `djinn.configure()` does, which loads all plugins
    djinn.configure(**settings)


@contextlib.contextmanager
def configured(**settings):
    """Configure `remote_accelerator` with one thread on both sides in the block. Then reset settings and threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        configure_anew(**settings)
        yield
    finally:
        configure_anew()
        torch.set_num_threads(threads)
