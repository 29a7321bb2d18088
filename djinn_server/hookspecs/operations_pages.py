"""`djinn_register_operations_pages`: add pages to a gateway's operations listener."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import attrs

from djinn_core.hookspecs import hookspec
from djinn_server.hookspecs import authenticators


@attrs.frozen
class HttpResponse:
    """An HTTP response.

    Attributes:
        status: of the response.
        body: bytes.
        content_type: with the charset.
    """

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@attrs.frozen
class EventFeed:
    """A streaming response: server-sent events.

    Attributes:
        next: returns the data of the next event, without newlines. Empty: no event now. None: the feed ends. Called from several
            threads, one at a time.
        seconds: pause between two calls.
    """

    next: Callable[[], bytes | None]
    seconds: float = 1.0


@attrs.frozen
class PageRequest:
    """A request for a page.

    Attributes:
        path: path after the name of the pages: empty, or it begins with `/`. Without the query.
        identity: identity of the client; None for a path in `open_paths`, which needs no token.
    """

    path: str
    identity: authenticators.Identity | None = None


@attrs.frozen
class WatchedServer:
    """A server as pages see it.

    Attributes:
        status: returns what `djinn status --json` shows of the server, for a tenant, or None for all: sessions, executors,
            memory, events. It queries the executors. This takes milliseconds, or seconds if an executor does not answer.
        end: ends the named session, if the identity may. Returns an error message, empty on success. None: pages cannot end
            sessions.
    """

    status: Callable[[str | None], Mapping[str, Any]]
    end: Callable[[str, authenticators.Identity], str] | None = None


class OperationsPages(ABC):
    """Serve pages below `/NAME` of a gateway's operations listener.

    If `answer` raises, the client receives status 500, and the log names the pages. If `begin` raises, the pages are not served.

    Attributes:
        name: unique among pages, and none of the listener's own routes: small letters, digits, `-` and `_`.
        open_paths: paths, as in `PageRequest`, that are answered without a token: a page's markup and scripts, nothing else.
    """

    name: str
    open_paths: frozenset[str] = frozenset()

    def begin(self, server: WatchedServer) -> None:  # noqa: B027 - static pages need no server
        """Prepare. Called once, when the server's executors are ready. The default does nothing."""

    def end(self) -> None:  # noqa: B027 - most pages start nothing
        """Stop the work that `begin` started.

        Called once, when the server admits no further clients. The default does nothing.
        """

    @abstractmethod
    def answer(self, request: PageRequest) -> HttpResponse | EventFeed:
        """Return the response to a GET request with a valid token, or for a path in `open_paths`.

        Called from several threads.
        """

    def act(self, request: PageRequest) -> HttpResponse:
        """Return the response to a POST request with a valid token, which may change state.

        The default is 405. Called like `answer`.
        """
        del request
        return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n")


@hookspec
def djinn_register_operations_pages(settings: Any) -> Iterable[OperationsPages]:
    """Return the pages that this plugin offers to the operations listener of `djinn serve --operations-port`.

    Called once in each gateway process. The listener checks the token before it asks for a page. Its Content-Security-Policy
    names no other host, and it rejects requests from other sites. A feed ends when its token expires. If `answer` raises, the
    client receives status 500, and the log names the pages. If the hook or `begin` raises, its pages are not served, and other
    pages continue.
    """
    del settings
    raise NotImplementedError
