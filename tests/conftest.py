"""Fixtures of the end-to-end tests: this process as the client of a server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow at times: that says nothing about a property.
settings.register_profile("djinn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("djinn")

# The tests start several hundred processes. Each would compile all of Djinn again where this is set, as in containers.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def url_of(serving):
    """Return a function that returns the server's URL for a scheme."""
    return lambda scheme: next(url for url in serving.urls if url.startswith(f"{scheme}://"))


@pytest.fixture(scope="session")
def connect(serving):
    """Return a context manager that connects `remote_accelerator` to a URL of the server, over its scheme only."""
    from configured import configured

    import djinn
    from djinn.testing import open_connections

    @contextlib.contextmanager
    def connect(url, **settings):
        # On one machine the built-in transport `local` would be faster, and taken.
        left_out = ("local", *settings.pop("disable", ()))
        with configured(servers=[url], token=serving.token, disable=left_out, **settings):
            djinn.reset_stats()
            djinn.init()
            assert open_connections()[0].url.startswith(url.partition("://")[0])
            yield

    return connect


@pytest.fixture(scope="module", params=["tcp", "http"])
def over(request, connect, url_of):
    """Connect `remote_accelerator` to a server in another process, over TCP and then over HTTP."""
    with connect(url_of(request.param)):
        yield request.param


@pytest.fixture(scope="module")
def over_tcp(connect, url_of):
    """Connect `remote_accelerator` to a server in another process, over TCP."""
    with connect(url_of("tcp")):
        yield
