"""Two executor processes behind one device."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

import djinn
from djinn_core.runtime import client


@pytest.fixture(scope="session")
def pooled():
    """A context in which two executors work as one, placed by a policy."""

    @contextlib.contextmanager
    def configure(policy, **settings):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("DJINN_")]:
                patch.delenv(name)
            patch.setenv("DJINN_CONFIG", os.devnull)
            try:
                djinn.configure(executors=2, threads=1, placement_policy=policy, **settings)
                djinn.init()
                yield client._state.session
            finally:
                djinn.configure()
                torch.set_num_threads(threads)

    return configure


@pytest.fixture(scope="module")
def blind(pooled):
    """Two executors, and ops placed on them in turn: nearly every value travels."""
    with pooled("round_robin", disable=["recomputation"]) as session:
        yield session
