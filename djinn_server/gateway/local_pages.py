"""Operations pages without a gateway: on loopback, for the user who started them. A code replaces the token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from http import HTTPStatus

import attrs

from djinn_server.gateway.operations import split_path
from djinn_server.gateway.operations_listener import OperationsListener
from djinn_server.hookspecs.authenticators import OPERATOR, Credentials, Identity
from djinn_server.hookspecs.operations_pages import EventFeed, HttpResponse, OperationsPages, PageRequest, WatchedServer


@attrs.frozen
class _LocalPages:
    """Implements `HttpResponder` with the pages of one plugin, for requests with the code."""

    pages: OperationsPages
    code: str = attrs.field(repr=False)

    def serves_browsers(self, path: str) -> bool:
        """Return True for the paths of the plugin's pages."""
        return split_path(path)[0] == self.pages.name

    def is_probe(self, path: str) -> bool:
        """Return False: pages of a local program have no probes."""
        del path
        return False

    def admits(self, shown: Credentials) -> bool:
        """Return True if the request has the code."""
        return hmac.compare_digest(shown.token.encode(errors="replace"), self.code.encode())

    def answer(self, path: str, shown: Credentials, accept: str) -> HttpResponse | EventFeed:
        """Return the page at a path, as `HttpResponder.answer` does."""
        del accept
        name, rest = split_path(path)
        if name == self.pages.name and rest in self.pages.open_paths:
            return self.pages.answer(PageRequest(rest))
        return self._respond(self.pages.answer, path, shown)

    def act(self, path: str, shown: Credentials) -> HttpResponse | EventFeed:
        """Carry out a POST request, as `HttpResponder.act` does."""
        return self._respond(self.pages.act, path, shown)

    def _respond(
        self, respond: Callable[[PageRequest], HttpResponse | EventFeed], path: str, shown: Credentials
    ) -> HttpResponse | EventFeed:
        if not self.admits(shown):
            text = f"the page is at /{self.pages.name}; this needs the code that the command printed\n"
            return HttpResponse(HTTPStatus.UNAUTHORIZED, text.encode())
        name, rest = split_path(path)
        return respond(PageRequest(rest if name == self.pages.name else path, Identity(OPERATOR)))


class PageServer:
    """Pages on loopback, with the status of any servers.

    Attributes:
        url: address of the pages.
    """

    def __init__(self, pages: OperationsPages, server: WatchedServer, code: str, port: int = 0) -> None:
        """Listen. `server`: source of the status for the pages. `code`: the browser's credential.

        Raises:
            TransportError: the port is taken.
        """
        self._pages = pages
        pages.begin(server)
        self._listener = OperationsListener("127.0.0.1", port, _LocalPages(pages, code))
        self.url = f"{self._listener.url}/{pages.name}"

    def close(self) -> None:
        """Stop listening."""
        self._pages.end()
        self._listener.close()
