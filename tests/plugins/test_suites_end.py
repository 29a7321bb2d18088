"""A conformance suite ends, and says what to mend, whatever a plugin waits for."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

SUITE = '''
import threading
import time

import pytest

from djinn.testing import ObserverConformance, TransportConformance
from djinn.hooks import Observer, Transport
from djinn_core.protocol.local import LocalTransport
from djinn.testing import suite, transports

suite.SECONDS = transports.SECONDS = 3.0


class OneLock:
    """A connection that never receives while it sends, and cannot be closed meanwhile."""

    def __init__(self, inner):
        self.inner, self.lock = inner, threading.Lock()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send(self, frame):
        with self.lock:
            self.inner.send(frame)

    def receive(self, timeout=None):
        with self.lock:
            return self.inner.receive(timeout)

    def close(self):
        with self.lock:
            self.inner.close()


class Changed(Transport):
    """The built-in transport with other connections."""

    def __init__(self, change):
        self.inner, self.change = LocalTransport(), change
        self.name, self.schemes, self.capabilities = self.inner.name, self.inner.schemes, self.inner.capabilities

    def connect(self, url, limits, timeout):
        return self.change(self.inner.connect(url, limits, timeout))

    def listen(self, url, limits, accept):
        return self.inner.listen(url, limits, lambda connection: accept(self.change(connection)))


class Forgetful:
    """A connection that counts less than it moves, as where a library makes the handshake."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        return found - 300 if name in {"bytes_sent", "bytes_received"} else found


class Deaf:
    """A connection whose `receive` knows no timeout."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def receive(self, timeout=None):
        return self.inner.receive()


class OnSockets(TransportConformance):
    limit_seconds = 20.0
    change = None

    @pytest.fixture
    def transport(self):
        return Changed(type(self).change)

    @pytest.fixture
    def listen_url(self):
        return "unix://"


class TestDeadlock(OnSockets):
    change = OneLock


class TestForgetful(OnSockets):
    change = Forgetful


class TestAllowed(OnSockets):
    change = Forgetful

    @pytest.fixture
    def uncounted_bytes(self):
        return 300


class TestTooMuch(OnSockets):
    change = Forgetful

    @pytest.fixture
    def uncounted_bytes(self):
        return 299


class TestDeaf(OnSockets):
    change = Deaf
    limit_seconds = 2.0


class Waiting(Observer):
    name = "waiting"

    def observe(self, event):
        threading.Event().wait()


class TestWaiting(ObserverConformance):
    limit_seconds = 2.0

    @pytest.fixture
    def observer(self):
        return Waiting()
'''


# What a test of it says where it fails; of one that passes, nothing.
SAYS = {
    "TestDeadlock::test_both_ends_send_at_once": "wait for each other while both ends send",
    "TestForgetful::test_counters_match_bytes_on_the_wire": "the fixture `uncounted_bytes`",
    "TestTooMuch::test_counters_match_bytes_on_the_wire": "leave out (300, 300, 300, 300) of them, but may leave out only 299",
    "TestAllowed::test_counters_match_bytes_on_the_wire": None,
    "TestDeaf::test_a_timeout_loses_nothing[up-0.05]": "the test has not ended after 2 s",
    "TestWaiting::test_observe_is_quick": "the test has not ended after 2 s",
    "TestWaiting::test_threads_may_call_it_concurrently": "`observe` must not wait",
}


@pytest.fixture(scope="module")
def failures(
    python: Any, plain_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the text of each test's failure, or an empty text if it passed. All tests run in one process."""
    folder = tmp_path_factory.mktemp("suites")
    (folder / "test_suite.py").write_text(SUITE)
    options = ["-q", "-p", "no:cacheprovider", "--junitxml=found.xml", *(f"test_suite.py::{test}" for test in SAYS)]
    done = python.run("-m", "pytest", *options, cwd=folder, env=plain_environment)
    assert done.returncode == 1, done.stdout
    cases = ET.parse(folder / "found.xml").iter("testcase")
    return {
        f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}": "".join(case.itertext())
        for case in cases
    }


@pytest.mark.parametrize("test", SAYS)
def test_suite_failure_ends_with_advice(failures: dict[str, str], test: str) -> None:
    says = SAYS[test]
    assert bool(failures[test]) is (says is not None)
    assert (says or "") in failures[test]
