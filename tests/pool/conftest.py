"""Two executor processes behind one device."""

from __future__ import annotations

import contextlib

import pytest
from configured import configured

import djinn
from djinn.testing import open_session


@pytest.fixture(scope="session")
def make_pool():
    """Return a context manager that makes a pool of two executors with a placement policy."""

    @contextlib.contextmanager
    def configure(policy, **settings):
        with configured(**{"executors": 2, "threads": 1, "placement_policy": policy, **settings}):
            djinn.init()
            yield open_session().router

    return configure


@pytest.fixture(scope="module")
def round_robin_pool(make_pool):
    """Yield the router of two executors that run ops alternately, so that nearly every value is transferred."""
    with make_pool("round_robin", disable=["recomputation"]) as router:
        yield router
