"""For every test, of the core and of plugins: nothing that the person has configured, and sums in one order."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # until tests run: what is imported and collected stays
for _name in [name for name in os.environ if name.startswith("DJINN_")]:
    del os.environ[_name]
os.environ["DJINN_CONFIG"] = os.devnull
os.environ["DJINN_CALIBRATE"] = "0"  # pools of tests would be measured beside the tests
os.environ["DJINN_KEEP_PLANS"] = "0"  # a test would find the plans of another one
# As many threads here as the executors of the tests have: sums are then taken in the same order.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores Ctrl-C for what it runs in the background, and processes pass that on; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Modules that tests of several folders use.
sys.path.insert(0, str(Path(__file__).parent / "tests" / "shared"))


_SHARED = pytest.StashKey[str]()


def pytest_collection_finish() -> None:
    """Collections leave alone what importing and collecting have made, which stays: each would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collections begin, also in the process that hands tests to others and collects none."""
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long forms run where they are asked for. Where Windows is simulated, no Python is forked from another one."""
    from long_forms import LONG

    for item in items:
        if not LONG and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a long form: make test-long"))
        if not hasattr(os, "fork") and "python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="it starts processes by forking"))


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Replace the user's cache directory, which is used by servers of tests, and the configuration directory.

    The cache is outside of all test folders, because servers may read models from test folders.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="djinn-tests-") as cache:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield cache


_PLAIN = {"DJINN_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def plain_environment(cache_directory):
    """Variables for child processes, as if the person had configured nothing; one thread each."""
    return os.environ | _PLAIN


@pytest.fixture(scope="session")
def python(plain_environment, request):
    """Starts Python processes that need not import torch first: `run` and `start`, see `shared/prepared_python.py`."""
    from prepared_python import PreparedPython, SharedPython

    address = getattr(request.config, "workerinput", {}).get("python")
    with contextlib.closing(SharedPython(address) if address else PreparedPython(plain_environment)) as prepared:
        yield prepared


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Processes that run tests beside each other have one that is forked; this one starts and ends it."""
    from prepared_python import PreparedPython

    if not hasattr(os, "fork"):
        return
    config = node.config
    if _SHARED not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="djinn-tests-")
        address = str(Path(folder.name, "python"))
        prepared = PreparedPython(os.environ | _PLAIN | {"XDG_CACHE_HOME": folder.name}, address)
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(prepared.close)
        config.stash[_SHARED] = address
    node.workerinput["python"] = config.stash[_SHARED]


@pytest.fixture(scope="session", autouse=True)
def forked_executors(request):
    """Executors that this process starts are forked, too: importing torch takes most of what starting one takes."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "fork"):  # not where Windows is simulated, which starts none
            from prepared_python import executors_forked

            patch.setattr(subprocess, "Popen", executors_forked(request.getfixturevalue("python")))
        yield
    if "djinn" in sys.modules:  # its executor ends before the process that knows how it ended
        sys.modules["djinn"].shut_down()


@pytest.fixture
def fresh_executors(monkeypatch):
    """Executors are interpreters of their own, as people's are."""
    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen.__base__)


@pytest.fixture(scope="session")
def serving(python, plain_environment, tmp_path_factory, cache_directory):
    """The connection file's content of a server that runs as long as the tests."""
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


@pytest.fixture(scope="session")
def served_environment(plain_environment, serving):
    """The same for child processes that use that server, and start no executor of their own."""
    return plain_environment | {"DJINN_SERVERS": ",".join(serving.urls), "DJINN_TOKEN": serving.token}


@pytest.fixture(scope="module", autouse=True)
def module_of_its_own():
    """What one module leaves does not reach the next: garbage, settings, and the log that commands of `djinn` showed."""
    gc.collect()
    gc.freeze()  # full collections, which libraries ask for, look at what this module makes, and at nothing before it
    yield
    if (client := sys.modules.get("djinn_client.runtime.client")) is not None and client.context.settings is not None:
        _leave_no_settings(client.context)
    if (logs := sys.modules.get("djinn_core.logs")) is not None:
        logs.hide()  # a log that is shown is kept from `caplog`


def _leave_no_settings(context):
    """Configure anew where a test has left settings, also by variables that are gone."""
    from configured import configure_anew

    from djinn_core.settings import resolve

    if context.overrides not in ({}, _EMBEDDED) or resolve(context.overrides).settings != context.settings:
        configure_anew()


@pytest.fixture
def plan_first_runs(monkeypatch):
    """Small programs are planned when they come for the first time, too, as the setting says, without a session of its own."""
    from djinn_client.runtime.planning import planner

    for name in ("_is_small", "_is_tiny"):
        monkeypatch.setattr(planner, name, lambda _: False)


@pytest.fixture
def embedded():
    """The device, on the executor that this process starts for itself; most tests share one. Gives its name."""
    from configured import configure_anew

    import djinn
    from djinn_client.runtime import client

    if client.context.overrides != _EMBEDDED:
        configure_anew(**_EMBEDDED)
    djinn.init()
    return "remote_accelerator:0"


_EMBEDDED = {"threads": 1}
if "SIMULATED_SERVER" in os.environ:  # where no executor can be started: tests/simulated/run_windows.py
    _EMBEDDED |= {"connection_file": os.environ["SIMULATED_SERVER"], "disable": os.environ["SIMULATED_DISABLE"].split()}
