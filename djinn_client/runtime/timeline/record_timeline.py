"""A block whose raw timeline is recorded: on this side by `Recording`, and by executors, which are asked to tell times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.runtime import client
from djinn_client.runtime.pool.pool_session import PoolSession
from djinn_client.runtime.session import Session
from djinn_client.runtime.timeline.recording import Recording, check_alone
from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.wire.timing_messages import TimingsReply, TimingsRequest

SAMPLES: Final = 3  # round trips by which clocks are compared before the block, or when a session begins in it
log = get_logger("djinn.profile")


@contextmanager
def record_timeline(*, ops: bool = False) -> Iterator[Recording]:
    """Record what all threads do inside the block, raw: the records are complete when it has ended.

    Work that was sent before is finished first, and what the block has sent before it ends: one round trip each, outside of what
    is measured. `ops`: executors time each instruction, and run programs op by op.

    Raises:
        DjinnError: another block is in force.
    """
    check_alone()
    recording = Recording(ops=ops)
    observers = client.context.observers
    recording.connected = lambda: _ask_executors(recording, TimingsRequest(ops=ops))
    if client.is_initialized():
        recording.connected()
    with client.observed_by(recording), recording.hooked():
        observers.timeline = recording
        recording.begun = time.perf_counter()
        try:
            yield recording
        finally:
            ended = time.perf_counter()
            try:
                if client.is_initialized():
                    _ask_executors(recording, TimingsRequest(on=False))
            finally:  # also where that is interrupted
                observers.timeline = None
                recording.ended = ended


def _ask_executors(recording: Recording, request: TimingsRequest) -> None:
    """Have executors tell times, or no more, when all that was recorded so far is done; and compare their clocks with this one."""
    try:
        if not request.on:
            current().flush()
        with recorders.sending:
            members = _members()
            for member in members:
                for _ in range(SAMPLES if request.on else 1):
                    begun = time.perf_counter()
                    reply = member.replies.ask(request, TimingsReply)
                    moments = begun, reply.clock, reply.clock, time.perf_counter()
                    recording.samples.append((member.replies.reader.number, reply.instance, *moments))
                    client.context.stats.round_trips -= 1  # it is none of the program's
    except DjinnError as error:
        log.warning("an executor is not asked for its times", reason=str(error))


def _members() -> list[Session]:
    """Sessions with executors that tell times."""
    session, opened = client.context.session, client.context.opened
    sessions = session.membership.here if isinstance(session, PoolSession) else (session,)
    pairs = zip(sessions, opened, strict=False)  # another thread may be ending the session
    return [one for one, known in pairs if isinstance(one, Session) and known.now.timings]
