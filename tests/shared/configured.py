"""The device with settings of a test's own."""

from __future__ import annotations

import contextlib

import torch

import djinn


def configure_anew(**settings):
    """The next session has these settings and no others; one that is open ends, whatever it holds."""
    from djinn_client.runtime import client

    djinn.shut_down()
    client.context.overrides = {}  # as `djinn.configure()` does, which loads all plugins
    djinn.configure(**settings)


@contextlib.contextmanager
def configured(**settings):
    """`remote_accelerator` has these settings and one thread here, as it has there; afterwards none, and as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        configure_anew(**settings)
        yield
    finally:
        configure_anew()
        torch.set_num_threads(threads)
