"""Fixtures that start processes: programs, executors and servers, as people start them or forked (`prepared_python.py`)."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

_PREPARED = pytest.StashKey()
_STARTING = {"python", "start_python", "serving"}
_PLAIN = {"DJINN_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def pytest_collection_modifyitems(items):
    """Skip tests that start servers or forks if Windows is simulated."""
    for item in items:
        if not hasattr(os, "fork") and _STARTING & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="it starts processes that Windows does not have"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let workers of pytest-xdist share a prepared process, which this process starts and ends."""
    from prepared_python import PreparedPython

    if not hasattr(os, "fork"):
        return
    config = node.config
    if _PREPARED not in config.stash:
        config.stash[_PREPARED] = PreparedPython(os.environ | _PLAIN)
        config.stash[_PREPARED].begin()
        config.add_cleanup(config.stash[_PREPARED].close)
    node.workerinput["prepared_python"] = config.stash[_PREPARED].address


@pytest.fixture(scope="session")
def plain_environment(cache_directory):
    """Return variables for child processes with one thread each, without any configuration."""
    return os.environ | _PLAIN


@pytest.fixture(scope="session")
def python(plain_environment, request):
    """Start programs that need not import torch first, with `run` and `start` of `Forks`. Executors are forked, too."""
    from prepared_python import Forks, PreparedPython

    address = getattr(request.config, "workerinput", {}).get("prepared_python")
    if address:
        yield Forks(address)
    else:
        with contextlib.closing(PreparedPython(plain_environment)) as prepared:
            yield prepared


@pytest.fixture(scope="module")
def fresh_processes():
    """Start executors and `start_python` processes without the prepared process, as users do."""


@pytest.fixture(scope="module", autouse=True)
def _forked_executors(request):
    """Fork executors of this process from a prepared process, except in files that request `fresh_processes`."""
    if not hasattr(os, "fork"):  # where Windows is simulated, which starts none
        yield
    elif "fresh_processes" in request.fixturenames:
        shut_down()  # another file may have forked the executor that is open
        yield
        shut_down()
    else:
        from djinn_server.launch import process

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_spawn", request.getfixturevalue("python").start_executor)
            yield


@pytest.fixture(scope="module")
def start_python(request):
    """Start `python` with the given arguments, as `subprocess.Popen` does; it is forked, except in a file that requests `fresh_processes`."""
    from servers import fresh_python

    return fresh_python if "fresh_processes" in request.fixturenames else request.getfixturevalue("python").start


@pytest.fixture(scope="session")
def serving(python, plain_environment, tmp_path_factory, cache_directory):
    """Start a server that runs as long as the tests. Return the content of its connection file."""
    from servers import start_server

    from djinn_core.protocol.connection_file import read_connection_file

    options = ["--threads", "1", "--drain-seconds", "1", "--store-gib", "0"]
    options += ["--models", str(tmp_path_factory.getbasetemp())]
    for flag, name in (("--save-weights", "saved"), ("--published", "published")):
        folder = Path(cache_directory, name)
        folder.mkdir()
        options += [flag, str(folder)]
    server = start_server(python.start, tmp_path_factory.mktemp("serving"), *options, env=plain_environment)
    yield read_connection_file(server.file)
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def own_server(start_python, tmp_path, plain_environment):
    """Return a function that starts a server with options of the test. The servers are killed at the test's end."""
    from servers import start_server

    servers = []

    def start(*options: str):
        servers.append(start_server(start_python, tmp_path, *options, env=plain_environment))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def served_environment(plain_environment, serving):
    """Return variables for child processes that use the shared server and start no own executor."""
    return plain_environment | {"DJINN_SERVERS": ",".join(serving.urls), "DJINN_TOKEN": serving.token}


def shut_down():
    """End this process's session and its executors."""
    if "djinn" in sys.modules:
        sys.modules["djinn"].shut_down()
