"""The suite for pages of the operations listener."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_server.hookspecs.authenticators import Identity
from djinn_server.hookspecs.operations_pages import EventFeed, HttpResponse, OperationsPages, PageRequest, WatchedServer


def _nothing(tenant: str | None) -> Mapping[str, Any]:
    del tenant
    return {"version": "26", "process": 7, "uptime": 1.0, "executors": [], "memory_by_owner": {}, "events": []}


class OperationsPagesConformance(Ending):
    """Subclass it and give the fixture `pages`."""

    @pytest.fixture
    def pages(self) -> OperationsPages:
        """The pages, of which `begin` was not called."""
        return missing(self, "pages", "your pages")  # type: ignore[return-value]

    def test_they_are_pages(self, pages: OperationsPages) -> None:
        """They have every member, and a name that a path can begin with."""
        require_protocol(pages, "operations_pages")
        assert re.fullmatch("[a-z][a-z0-9_-]*", pages.name), f"{pages.name!r} is no name for a path"

    def test_what_is_open_needs_no_token(self, pages: OperationsPages) -> None:
        """Each path in `open_paths` is answered with 200 without an identity."""
        pages.begin(WatchedServer(_nothing))
        for path in pages.open_paths:
            response = pages.answer(PageRequest(path))
            assert isinstance(response, HttpResponse), f"{path!r} is open and is a feed"
            assert response.status == HTTPStatus.OK, f"{path!r} is in `open_paths` and not there"
        pages.end()

    def test_an_unknown_path_is_not_found(self, pages: OperationsPages) -> None:
        """It is answered, and not with 200."""
        pages.begin(WatchedServer(_nothing))
        response = pages.answer(PageRequest("/none-of-that-name", Identity("alice")))
        pages.end()
        assert isinstance(response, HttpResponse)
        assert response.status == HTTPStatus.NOT_FOUND

    def test_a_tenant_is_shown_its_own(self, pages: OperationsPages) -> None:
        """A tenant's feed never requests the status of all tenants."""
        asked: list[str | None] = []

        def status(tenant: str | None) -> Mapping[str, Any]:
            asked.append(tenant)
            return _nothing(tenant)

        pages.begin(WatchedServer(status))
        pages.end()
        for path in {"", "/", "/feed", "/events", "/status"} - pages.open_paths:
            asked.clear()
            response = pages.answer(PageRequest(path, Identity("alice")))
            if isinstance(response, EventFeed):
                data = response.next()
                assert data is None or b"\n" not in data, "the data of an event has a newline"
            assert None not in asked, f"{path!r} asks for the status of all tenants, for one of them"
