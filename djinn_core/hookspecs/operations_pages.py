"""`djinn_register_operations_pages`: pages that a gateway's operations listener serves beside its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import attrs

from djinn_core.hookspecs import authenticators, hookspec


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
    """A response that goes on: server-sent events.

    Attributes:
        next: the data of the next event, without newlines; empty: none this time; None: the feed ends. Called in threads,
            not twice at the same time.
        seconds: pause between two calls.
    """

    next: Callable[[], bytes | None]
    seconds: float = 1.0


@attrs.frozen
class PageRequest:
    """A request for a page.

    Attributes:
        path: what follows the name of the pages: empty, or it begins with `/`. Without the query.
        identity: who asks; None for a path in `open_paths`, where no token is looked at.
    """

    path: str
    identity: authenticators.Identity | None = None


@attrs.frozen
class WatchedServer:
    """A server as pages see it.

    Attributes:
        status: for a tenant, or None for all tenants, the object that `djinn status --json` shows of a server: sessions, executors,
            memory, events. It asks the executors, which takes milliseconds, and at most seconds where one does not answer.
        end: ends the session of this name, if the identity may, and returns an error message, empty if it was ended. None: pages cannot end
            sessions.
    """

    status: Callable[[str | None], Mapping[str, Any]]
    end: Callable[[str, authenticators.Identity], str] | None = None


class OperationsPages(ABC):
    """Serve pages below `/NAME` of a gateway's operations listener.

    A request for which `answer` raises is answered with 500, and the log names the pages; an exception in `begin` leaves
    them out.

    Attributes:
        name: unique among pages, and none of the listener's own routes: small letters, digits, `-` and `_`.
        open_paths: paths, as in `PageRequest`, that are answered without a token: a page's markup and scripts, nothing else.
    """

    name: str
    open_paths: frozenset[str] = frozenset()

    def begin(self, server: WatchedServer) -> None:  # noqa: B027 - static pages need no server
        """Get ready. Called once, when the server's executors are. By default nothing."""

    def end(self) -> None:  # noqa: B027 - most pages start nothing
        """Stop what `begin` started. Called once, when the server admits no further clients. By default nothing."""

    @abstractmethod
    def answer(self, request: PageRequest) -> HttpResponse | EventFeed:
        """The response to a GET request with a good token, or for one of `open_paths`; called in threads, several at a time."""

    def act(self, request: PageRequest) -> HttpResponse:
        """The response to a POST request with a good token, which may change something; by default 405. Called like `answer`."""
        del request
        return HttpResponse(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n")


@hookspec
def djinn_register_operations_pages(settings: Any) -> Iterable[OperationsPages]:
    """Return the pages that this plugin offers to the operations listener of `djinn serve --operations-port`.

    Called once in each gateway process. The listener checks the token before it asks for a page, names no other host in its
    Content-Security-Policy and answers no request of another site's page. A feed ends when its token is not good any more. Pages whose
    `answer` raises an exception are answered for with 500, and the log names them; an exception in the hook or in `begin` leaves them
    out. A page that raises harms no other.
    """
    del settings
    raise NotImplementedError
