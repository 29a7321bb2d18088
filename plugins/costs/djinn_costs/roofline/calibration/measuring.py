"""Measure the time that an executor needs for a program, without recording, transport and waiting."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import djinn
from djinn.errors import ConfigurationError
from djinn.hooks import Event, Observer
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client
from djinn_client.runtime.context import context
from djinn_client.runtime.session import Session
from djinn_core.system.processes import ThreadTimes
from djinn_core.wire.timing_messages import TimingsReply, TimingsRequest

DEVICE: Final = "remote_accelerator:0"


class Clock(Protocol):
    """Clock that counts the seconds in which an executor works."""

    def read(self) -> float:
        """Return the seconds counted so far. Call this only while no submission is pending."""


class ExecutorClock(Observer):
    """Clock that adds the run times which executors report with each submission."""

    name = "executor_clock"
    events = frozenset({"completed"})

    def __init__(self) -> None:
        self._seconds = 0.0

    def observe(self, event: Event) -> None:
        """Add the run time of a submission."""
        self._seconds += event.fields["execute"]

    def read(self) -> float:
        """Return the sum of the reported run times, in seconds."""
        return self._seconds


def processor_clock(process: int) -> Clock | None:
    """Return a clock of the processor time of the executor with process id `process` on this machine.

    Return None if `process` is this process, or if its times cannot be read. Other load of the machine influences
    processor time less than elapsed time.
    """
    if process == os.getpid():
        return None
    try:
        return ThreadTimes(process)
    except OSError:
        return None


@contextmanager
def measuring(*, processor_time: bool = False) -> Iterator[Clock]:
    """Context manager with a clock for the open session.

    Inside the block, executors run no predicted submissions, because no clock counts them.

    Raises:
        ConfigurationError: processor time was requested, but the executor is not a process of this machine, or it has
            several threads.
    """
    djinn.init()
    clock: Clock = (observer := ExecutorClock())
    if processor_time:
        process = client.executor_process()
        executor_clock = processor_clock(process)
        if executor_clock is None:
            raise ConfigurationError(
                f"processor time can be measured only for an executor process on this machine under Linux; the executor's process {process} is not one"
            )
        if (device := client.device()) is None or device.threads != 1:  # idle threads of an op spin
            raise ConfigurationError(
                "processor time tells how long an op takes only on one thread: set `threads` to 1, such as by DJINN_THREADS=1"
            )
        clock = executor_clock
    session = context.session
    assert session is not None
    _request_timings(session, on=True)
    try:
        with client.observed_by(observer):
            yield clock
    finally:
        if context.session is session and not session.lost:
            _request_timings(session, on=False)


def _request_timings(session: Session, *, on: bool) -> None:
    djinn.synchronize()
    with port.lock:
        for executor in session.executors.current:
            executor.replies.ask(TimingsRequest(on), TimingsReply)


def seconds_of(run: Callable[[], object], clock: Clock) -> float:
    """Return the time that the executor takes for the ops that `run` records."""
    djinn.synchronize()
    start = clock.read()
    result = run()
    djinn.synchronize()
    probe_seconds = clock.read() - start
    del result
    return probe_seconds


def warm_up(run: Callable[[], object], clock: Clock) -> None:
    """Run a program three times. The first run loads kernels, and the third run prepares native replay."""
    for _ in range(3):
        seconds_of(run, clock)


@contextmanager
def without_collection() -> Iterator[None]:
    """Context manager that pauses Python's garbage collector.

    The collector frees tensors, which would add unrelated work.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
