"""An executor that was started early, and that no session comes to, ends by itself."""

from __future__ import annotations

import os
import threading
import time

import attrs
import pytest

from djinn_server import control
from djinn_server.control import Control


@attrs.define
class FakeServer:
    """A fake executor that counts ticks."""

    idle: bool
    ticks: int = 0

    def tick(self):
        self.ticks += 1

    def stop_accepting(self):
        """Do nothing: there are no listeners."""


@pytest.fixture
def pipes():
    """Yield three pipe ends: the executor's input, the parent's end of it, and the executor's output."""
    (orders, ordering), (reading, reports) = os.pipe(), os.pipe()
    yield orders, ordering, reports
    for descriptor in (ordering, reading, reports):
        os.close(descriptor)


def test_executor_without_session_ends(pipes, monkeypatch):
    monkeypatch.setattr(control, "_WATCH_SECONDS", 0.01)
    orders, _, reports = pipes
    Control(orders, reports).run(FakeServer(idle=True), 0.05)  # returns


def test_executor_with_session_stays(pipes, monkeypatch):
    monkeypatch.setattr(control, "_WATCH_SECONDS", 0.01)
    orders, ordering, reports = pipes
    serving = FakeServer(idle=False)
    thread = threading.Thread(target=Control(orders, reports).run, args=(serving, 0.05))
    thread.start()
    while not serving.ticks:
        time.sleep(0.001)
    serving.idle, at = True, serving.ticks  # its only session has ended
    time.sleep(0.1)
    assert thread.is_alive()
    assert serving.ticks > at
    os.write(ordering, b'{"type":"drain","seconds":0}\n')
    thread.join(60)
    assert not thread.is_alive()
