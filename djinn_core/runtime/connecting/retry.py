"""Retries with jitter and a time limit, for requests that a busy server refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from djinn_core.backoff import Backoff
from djinn_core.errors import ServerBusy
from djinn_core.logs import get_logger

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 3.0
_log = get_logger("djinn.runtime")
T = TypeVar("T")


def with_patience(attempt: Callable[[], T], seconds: float) -> T:
    """Call `attempt`, again while the server has no room, for at most so many seconds; return its result.

    Only for attempts that leave nothing behind where they fail, such as to begin a session.

    Raises:
        ServerBusy: there was no room in all that time.
    """
    deadline, backoff = time.monotonic() + seconds, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    while True:
        try:
            return attempt()
        except ServerBusy as busy:
            pause = max(backoff.jittered(), busy.after)
            if time.monotonic() + pause > deadline:
                raise
            _log.info("the server has no room for now; asking again", seconds=round(pause, 2), reason=str(busy))
        time.sleep(pause)
