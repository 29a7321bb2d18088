"""Responses of the operations server: single responses, and feeds of server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import attrs


@attrs.frozen
class HttpResponse:
    """An HTTP response."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


@attrs.frozen
class EventFeed:
    """A response that continues: server-sent events.

    Attributes:
        next: returns the data of the next event, without newlines. Called from several threads, one at a time.
        seconds: pause between two calls.
    """

    next: Callable[[], bytes]
    seconds: float = 1.0
