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
        raise ConfigurationError(f"djinn.deadline needs a number of seconds above 0, not {seconds!r}")
    thread = device_state.thread
    outer, until = thread.waits_until, time.monotonic() + seconds
    thread.waits_until = until if outer is None else min(outer, until)
    try:
        yield
    finally:
        thread.waits_until = outer


def wait_deadline() -> float | None:
    """Return the deadline of a wait that begins now, in seconds of the monotonic clock, or None if there is no limit."""
    until, limit = device_state.thread.waits_until, device_state.wait_timeout
    if not limit:
        return until
    latest = time.monotonic() + limit
    return latest if until is None else min(until, latest)


def deadline_error(server: str) -> DeadlineExceeded:
    """Return the error for a wait for `server` that exceeded its deadline. `server` is its name in the message."""
    return DeadlineExceeded(
        f"{server} did not answer before the deadline (djinn.deadline, or the setting wait_timeout). The executor stops this "
        "thread's programs between two ops. Values that they did not compute or write raise ProgramStopped; other values "
        "stay usable"
    )


@contextmanager
def locked_in_time(lock: InterruptibleLock) -> Iterator[None]:
    """Context manager that holds `lock`, the sink's lock. Other threads hold the lock while they wait for the executor.

    Raises:
        DeadlineExceeded: the lock was not free before this thread's deadline. Nothing was sent.
        KeyboardInterrupt: Ctrl-C came while this thread waited for the lock.
    """
    until = wait_deadline()
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
