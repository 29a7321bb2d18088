"""Options of `djinn serve` that say how many it serves at a time, and when it is full."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import click

from djinn_core.server.admission_limits import QUEUE_SECONDS, SESSIONS


@attrs.frozen
class RoomChoice:
    """Admission limits that the operator set."""

    sessions: int
    queue_seconds: float


def room_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about room, handed to `command` as one `RoomChoice` named `room`."""

    @click.option(
        "--most-sessions",
        type=click.IntRange(1),
        default=SESSIONS,
        show_default=True,
        help="How many sessions each executor serves at a time; further ones are refused for now.",
    )
    @click.option(
        "--most-queue-seconds",
        type=click.FloatRange(0, min_open=True),
        default=QUEUE_SECONDS,
        show_default=True,
        help="No further session begins while a program has waited longer for its turn on the device.",
    )
    @functools.wraps(command)
    def packed(most_sessions: int, most_queue_seconds: float, **others: Any) -> None:
        command(room=RoomChoice(most_sessions, most_queue_seconds), **others)

    return packed
