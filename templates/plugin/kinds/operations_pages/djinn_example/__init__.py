"""Pages for Djinn's operations listener: the sessions of the one who asks, as JSON."""

from __future__ import annotations

import json
from http import HTTPStatus

from djinn.hooks import HttpResponse, OperationsPages, PageRequest, WatchedServer, hookimpl

djinn_api_version = "2.0"


class ExamplePages(OperationsPages):
    """`/example/sessions`, for a token."""

    name = "example"

    def begin(self, server: WatchedServer) -> None:
        """Called once, when the server's executors are ready."""
        self._server = server

    def answer(self, request: PageRequest) -> HttpResponse:
        """Called in threads, several at a time."""
        if request.path != "/sessions" or request.identity is None:
            return HttpResponse(HTTPStatus.NOT_FOUND, b"there is /example/sessions\n")
        identity = request.identity
        status = self._server.status(None if identity.sees_all else identity.tenant)
        sessions = [session["session"] for executor in status["executors"] for session in executor["sessions"]]
        return HttpResponse(HTTPStatus.OK, json.dumps(sessions).encode(), "application/json")


@hookimpl
def djinn_register_operations_pages() -> list[OperationsPages]:
    """The pages that this plugin offers."""
    return [ExamplePages()]
