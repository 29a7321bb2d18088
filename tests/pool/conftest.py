"""Two executor processes behind one device."""

from __future__ import annotations

import contextlib

import pytest
from configured import configured

import djinn
from djinn.testing import open_session


@pytest.fixture(scope="session")
def pooled():
    """A context in which two executors work as one, placed by a policy."""

    @contextlib.contextmanager
    def configure(policy, **settings):
        with configured(**{"executors": 2, "threads": 1, "placement_policy": policy, **settings}):
            djinn.init()
            yield open_session().router

    return configure


@pytest.fixture(scope="module")
def blind(pooled):
    """Two executors, and ops placed on them in turn: nearly every value travels."""
    with pooled("round_robin", disable=["recomputation"]) as router:
        yield router
