"""For every test, of the core and of plugins: nothing that the person has configured, and sums in one order."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.disable()  # until tests run: what is imported and collected stays
for _name in [name for name in os.environ if name.startswith("DJINN_")]:
    del os.environ[_name]
os.environ["DJINN_CONFIG"] = os.devnull
os.environ.setdefault("CONFORMANCE_SECONDS", "120")  # tests run beside others
os.environ["DJINN_CALIBRATE"] = "0"  # pools of tests would be measured beside the tests
# As many threads here as the executors of the tests have: sums are then taken in the same order.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores Ctrl-C for what it runs in the background, and processes pass that on; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Modules that tests of several folders use.
sys.path.insert(0, str(Path(__file__).parent / "tests" / "shared"))

pytest_plugins = ["process_fixtures"]


def pytest_collection_finish() -> None:
    """Collections leave alone what importing and collecting have made, which stays: each would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collections begin, also in the process that hands tests to others and collects none."""
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long forms run where they are asked for."""
    from long_forms import LONG

    for item in items:
        if not LONG and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a long form: make test LONG_FORMS=1"))


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Replace the user's cache directory, which is used by servers of tests, and the configuration directory.

    The cache is outside of all test folders, because servers may read models from test folders.
    """
    import process_fixtures

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="djinn-tests-") as cache:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield cache
        process_fixtures.shut_down()  # an executor writes there


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
    if (role := sys.modules.get("djinn_core.system.role")) is not None:
        assert role.is_client(), "a test has made this process a server's: run that server in a process of its own"


def _leave_no_settings(context):
    """Configure anew where a test has left settings, also by variables that are gone."""
    from configured import configure_anew

    from djinn_core.settings import resolve

    if context.overrides not in ({}, _EMBEDDED) or resolve(context.overrides).settings != context.settings:
        configure_anew()


@pytest.fixture
def plans_all(monkeypatch):
    """Every program is planned, as under a limit of memory, without a session of its own."""
    from djinn_client.runtime.planning import session_planner

    monkeypatch.setattr(session_planner, "plans_all", lambda _: True)


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
if "SIMULATED_SERVER" in os.environ:  # where no executor can be started: evaluation/simulated/run_windows.py
    _EMBEDDED |= {"connection_file": os.environ["SIMULATED_SERVER"], "disable": os.environ["SIMULATED_DISABLE"].split()}
