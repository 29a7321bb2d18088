"""Conformance suite for operations servers."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.wire.executor_reports import ExecutorMetrics
from djinn_server.hookspecs.authenticators import Credentials, Denial, Identity
from djinn_server.hookspecs.operations import OperationsAddress, OperationsServer, ServerMetrics, WatchedServer

TOKEN = "a-token-of-this-suite"
_SECONDS = 60.0


def _status(tenant: str | None) -> Mapping[str, Any]:
    del tenant
    return {"version": "26", "process": 7, "uptime": 1.0, "executors": [], "memory_by_owner": {}, "events": []}


def _identify(credentials: Credentials, path: str) -> Identity | Denial:
    del path
    return Identity("default") if credentials.token == TOKEN else Denial("unknown token", "token")


def _metrics() -> ServerMetrics:
    return ServerMetrics(ExecutorMetrics(), {})


class OperationsServerConformance(Ending):
    """Tests that every operations server must pass. Subclass this class and define the fixture `operations`."""

    @pytest.fixture
    def operations(self) -> OperationsServer:
        """Return the operations server under test, before `start`."""
        return missing(self, "operations", "your operations server")  # type: ignore[return-value]

    def test_operations_server_has_every_member(self, operations: OperationsServer) -> None:
        """The server has all attributes and methods of `OperationsServer`, and its routes are URL paths."""
        require_protocol(operations, "operations")
        assert operations.routes, "`routes` is empty"
        assert all(route.startswith("/") for route in operations.routes), f"{operations.routes}: start with /"

    def test_routes_need_a_valid_token(self, operations: OperationsServer) -> None:
        """Each route answers a request with a valid token.

        A route refuses an invalid token, unless the route is the page that asks for a token.
        """
        server = WatchedServer(_status, lambda *_: "", _identify, metrics=_metrics)
        url = operations.start(server, OperationsAddress("127.0.0.1"))
        try:
            for route in operations.routes:
                assert _get(url + route, TOKEN) == HTTPStatus.OK, f"the server does not answer {route}"
                is_refused = _get(url + route, "another") == HTTPStatus.UNAUTHORIZED
                assert is_refused or _is_page(url + route), f"{route} is answered for an invalid token"
        finally:
            operations.close()


def _get(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310 - of the server above
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:  # noqa: S310 - the same
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


def _is_page(url: str) -> bool:
    """Return True if a request without a token gets a page that asks for the token."""
    with urllib.request.urlopen(url, timeout=_SECONDS) as response:  # noqa: S310 - of the server above
        return str(response.headers["Content-Type"]).startswith("text/html")
