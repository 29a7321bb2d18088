"""Probes of the operations listener answer while every other request waits."""

from __future__ import annotations

import http.client
import threading

import pytest

from djinn.hooks import OperationsAddress
from djinn_observability.dashboard import listener as operations_listener
from djinn_observability.dashboard.listener import OperationsListener
from djinn_observability.dashboard.responses import HttpResponse

REQUESTS = 40  # more than asyncio's own threads, of which it has 32 at most


class WaitingRoutes:
    """Routes whose metrics wait, as with executors that do not reply."""

    def __init__(self):
        self.waits, self.go_on = threading.Event(), threading.Event()

    def serves_browsers(self, path):
        return False

    def admits(self, shown):
        return True

    def answer(self, path, shown, accept):
        if path != "/livez":
            self.waits.set()
            self.go_on.wait(60)
        return HttpResponse(200, b"ok\n")


@pytest.fixture
def waiting():
    routes = WaitingRoutes()
    yield routes
    routes.go_on.set()


def ask(listener, path):
    connection = http.client.HTTPConnection(listener.url.partition("://")[2], timeout=60)
    connection.request("GET", path)
    return connection


def test_liveness_answers_while_all_other_requests_wait(waiting, monkeypatch):
    monkeypatch.setattr(operations_listener, "REQUEST_SECONDS", 30.0)
    listener = OperationsListener(OperationsAddress("127.0.0.1"), waiting)
    try:
        others = [ask(listener, "/metrics") for _ in range(REQUESTS)]
        assert waiting.waits.wait(60)
        probe = ask(listener, "/livez")
        assert probe.getresponse().read() == b"ok\n"
        waiting.go_on.set()
        assert [other.getresponse().read() for other in others] == [b"ok\n"] * REQUESTS
        for connection in (*others, probe):
            connection.close()
    finally:
        waiting.go_on.set()
        listener.close()
