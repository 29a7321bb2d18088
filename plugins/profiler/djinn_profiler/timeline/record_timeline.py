"""Recording of a block's raw timeline: by `Recording` on the client, and by executors, which report times on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from djinn_client.interception.recording.recorder import current
from djinn_client.interception.runtime_interface import port
from djinn_client.runtime import client
from djinn_client.runtime.context import context
from djinn_client.runtime.executor_client import ExecutorClient
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.wire.timing_messages import TimingsReply, TimingsRequest
from djinn_profiler.timeline.recording import Recording, check_alone

SAMPLES: Final = 3  # round trips to compare clocks before the block, or when a session begins inside it
log = get_logger("djinn.profile")


@contextmanager
def record_timeline(*, ops: bool = False) -> Iterator[Recording]:
    """Context manager that records raw events of all threads inside the block.

    The records are complete when the block has ended. Earlier work finishes before the block starts, and the block's
    work before it ends: one round trip each, outside of the measured time. `ops`: True to time each instruction, and
    run programs op by op.

    Raises:
        DjinnError: another block is active.
    """
    check_alone()
    recording = Recording(ops=ops)
    recording.connected = lambda: _request_timings(recording, TimingsRequest(ops=ops))
    if client.is_initialized():
        recording.connected()
    with client.observed_by(recording), recording.hooked():
        recording.begun = time.perf_counter()
        try:
            yield recording
        finally:
            ended = time.perf_counter()
            recording.ended = ended
            if client.is_initialized():
                _request_timings(recording, TimingsRequest(on=False))


def _request_timings(recording: Recording, request: TimingsRequest) -> None:
    """Make executors start or stop reporting times after all recorded work, and add a sample of each clock."""
    try:
        if not request.on:
            current().flush()
        with port.lock:
            members = _members()
            for member in members:
                for _ in range(SAMPLES if request.on else 1):
                    begun = time.perf_counter()
                    reply = member.replies.ask(request, TimingsReply)
                    moments = begun, reply.clock, reply.clock, time.perf_counter()
                    recording.samples.append((member.replies.reader.number, reply.instance, *moments))
                    context.stats.round_trips -= 1  # this request is not the program's
    except DjinnError as error:
        log.warning("an executor did not start or stop reporting times", reason=str(error))


def _members() -> list[ExecutorClient]:
    session = context.session  # another thread may be ending the session
    return [] if session is None else [*session.executors.current]
