"""Deadlines and timeouts of waits for executors: `deadline` and the setting `wait_timeout`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.runtime_interface import port
from djinn_core.errors import ConfigurationError, DeadlineExceeded, ProgramStopped


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit all waits of this thread inside the block together to `seconds`.

    A longer wait raises `DeadlineExceeded`, and executors stop the unanswered submissions of this thread between two ops. Values that
    these were to make or write raise `ProgramStopped` when they are used; all others, and the session, live on. Of nested deadlines
    the earliest counts.

    Raises:
        ConfigurationError: `seconds` is not above 0.
        DeadlineExceeded: a wait inside the block took too long.
    """
    if not seconds > 0:
        raise ConfigurationError(f"a deadline is a number of seconds above 0, not {seconds!r}")
    thread = device_state.thread
    before, until = thread.waits_until, time.monotonic() + seconds
    thread.waits_until = until if before is None else min(before, until)
    try:
        yield
    finally:
        thread.waits_until = before


def due() -> float | None:
    """Deadline, on the monotonic clock, of a wait that begins now; None: no limit."""
    until, limit = device_state.thread.waits_until, port.wait_timeout
    if not limit:
        return until
    latest = time.monotonic() + limit
    return latest if until is None else min(until, latest)


def exceeded(server: str) -> DeadlineExceeded:
    """Error of a wait that exceeded its deadline."""
    return DeadlineExceeded(
        f"{server} did not answer before the deadline (djinn.deadline, or the setting wait_timeout). What this thread had sent is "
        "stopped between two ops: values that it was to make or write raise ProgramStopped, all others can be used"
    )


def cancelled(server: str) -> ProgramStopped:
    """Error of a wait that `djinn.cancel` ended."""
    return ProgramStopped(
        f"djinn.cancel() was called while this thread waited for {server}. What was sent is stopped between two ops: values that it "
        "was to make or write raise ProgramStopped, all others can be used"
    )
