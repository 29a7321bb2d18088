"""Deadlines of waits: `djinn.deadline`, and the setting `wait_timeout`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from djinn_client.interception.device.device_state import device_state
from djinn_core.errors import ConfigurationError, DeadlineExceeded
from djinn_core.system.interrupts import LOOK_SECONDS, InterruptibleLock, interrupt_mask


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit all waits of this thread inside the block together to `seconds`.

    A longer wait raises `DeadlineExceeded`, and executors stop the unanswered submissions of this thread between two
    ops. A stopped submission does not compute or write some values: using such a value raises `ProgramStopped`. All
    other values, and the session, stay usable. The earliest of nested deadlines applies.

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
    """Return the deadline, on the monotonic clock, of a wait that begins now. None: no limit."""
    until, limit = device_state.thread.waits_until, device_state.wait_timeout
    if not limit:
        return until
    latest = time.monotonic() + limit
    return latest if until is None else min(until, latest)


def exceeded(server: str) -> DeadlineExceeded:
    """Return the error for a wait that exceeded its deadline. `server`: name of the server, for the message."""
    return DeadlineExceeded(
        f"{server} did not answer before the deadline (djinn.deadline, or the setting wait_timeout). What this thread had sent is "
        "stopped between two ops: values that it was to make or write raise ProgramStopped, all others can be used"
    )


@contextmanager
def locked_in_time(lock: InterruptibleLock) -> Iterator[None]:
    """Context manager that holds the sink's lock. Another thread may hold the lock while it waits for the executor.

    Raises:
        DeadlineExceeded: the lock was not free before this thread's deadline. Nothing was sent.
        KeyboardInterrupt: Ctrl-C came while this thread waited for the lock.
    """
    until = due()
    while not lock.acquire(
        timeout=LOOK_SECONDS if until is None else max(0.0, min(LOOK_SECONDS, until - time.monotonic()))
    ):
        interrupt_mask.check()
        if until is not None and time.monotonic() >= until:
            raise DeadlineExceeded(
                "this thread's deadline passed (djinn.deadline, or the setting wait_timeout) while another thread waited for "
                "the executor. Nothing was sent for this thread: try again"
            )
    try:
        yield
    finally:
        lock.release()
