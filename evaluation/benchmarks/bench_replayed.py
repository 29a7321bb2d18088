"""Processor time of an executor per submission, with 64 busy sessions divided by one, with replayed frames.

    python -m evaluation.benchmarks.bench_replayed [--json] [--quick] [--rounds 5] [--case decode]

A session of a real program is recorded once. Clients replay its frames, each over its own connection. They build no
messages and call no PyTorch, so one process drives all of them. One client and 64 clients alternate. A client sends
without waiting until a submission fetches. Both ways send the same number of submissions. Sessions begin before the
clock starts. Needs Linux.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from djinn_core.hookspecs.transports import Frame
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.messages import Completed, Submit, decode
from evaluation.benchmarks.bench_models import REMOTE, TOY, Start, own_loop
from evaluation.benchmarks.bench_models import decode as decoding
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, main
from evaluation.benchmarks.paired import processor_seconds
from evaluation.fuzz import recording
from evaluation.fuzz.live import Talk
from evaluation.served import served

SESSIONS = 64
WARM_SUBMISSIONS = 150
SUBMISSIONS = 1500  # submissions of one client after the warm-up


@attrs.frozen
class Recording:
    """Frames of a session.

    `awaited`: for each frame, the submission whose reply the client waits for after sending it, or 0. `warm`: number of
    frames before the clock starts. `submissions`: number of submissions after these frames.
    """

    frames: Sequence[Frame]
    awaited: Sequence[int]
    warm: int
    submissions: int


def record(url: str, token: str, start: Start, submissions: int) -> Recording:
    """Record a session with at least this many submissions after the warm-up."""
    with recording.record(url, token) as frames:
        step = start(REMOTE)
        while sum(isinstance(decode(frame.head), Submit) for frame in frames) < WARM_SUBMISSIONS + submissions:
            for _ in range(20):
                step()
    messages = [decode(frame.head) for frame in frames]
    awaited_sequences = [
        message.sequence if isinstance(message, Submit) and message.fetch else 0 for message in messages
    ]
    places = [place for place, message in enumerate(messages) if isinstance(message, Submit)]
    warm = next(place for place in places[WARM_SUBMISSIONS:] if awaited_sequences[place]) + 1
    return Recording(tuple(frames), awaited_sequences, warm, sum(place >= warm for place in places))


class Replay:
    """A client that replays a session in a thread."""

    def __init__(self, recording: Recording, begin: Callable[[], Talk]) -> None:
        self._recording, self.talk = recording, begin()
        self._go = threading.Event()
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for at, (frame, awaited) in enumerate(zip(self._recording.frames, self._recording.awaited, strict=True)):
            if at == self._recording.warm:
                self._done.set()
                self._go.wait()
            self.talk.send(frame)
            while awaited:
                message, _ = self.talk.receive()
                if isinstance(message, Completed) and message.sequence == awaited:
                    break
        self._done.set()

    def wait(self) -> None:
        """Wait until the first frames are sent or, after `release_part`, until the last reply has arrived."""
        if not self._done.wait(600):
            raise RuntimeError("a client that replays frames has no reply")

    def release_part(self) -> None:
        """Send the remaining frames."""
        self._done.clear()
        self._go.set()


def seconds_per_submission(recording: Recording, sessions: int, times: int, begin: Callable[[], Talk]) -> float:
    """Return the executor's processor seconds per submission, while `sessions` sessions replay `times` times."""
    seconds = 0.0
    for _ in range(times):
        clients = [Replay(recording, begin) for _ in range(sessions)]
        for client in clients:
            client.wait()
        process = clients[0].talk.process
        before = processor_seconds([process])
        for client in clients:
            client.release_part()
        for client in clients:
            client.wait()
        seconds += processor_seconds([process]) - before
        for client in clients:
            client.talk.close()
    return seconds / (recording.submissions * sessions * times)


def replayed(start: Start, effort: Effort) -> Outcome:
    """Return the processor time per submission with many clients, divided by the time with one client."""
    if sys.platform != "linux":
        raise CannotMeasureError("processor time of another process is measured on Linux only")
    sessions = 3 if effort.small else SESSIONS
    submissions = 20 if effort.small else SUBMISSIONS // (8 if effort.quick else 2)
    registry = load_registry(Selection(), builtins=builtin_plugins())
    with served("--store-gib", "0", "--most-sessions", str(2 * sessions), threads=effort.threads) as serving:
        url, token = serving.tcp, serving.token
        recording = record(url, token, start, submissions)
        begin = partial(Talk.begin, url, token, registry.transports)
        results: dict[int, list[float]] = {1: [], sessions: []}
        for turn in range(1 if effort.small else effort.rounds):
            for many in (1, sessions) if turn % 2 else (sessions, 1):
                times = 1 if many > 1 or effort.small else 4
                results[many].append(seconds_per_submission(recording, many, times, begin))
    alone, together = (statistics.median(results[many]) * 1e6 for many in (1, sessions))
    figures: dict[str, Any] = {"alone us": alone, "together us": together, "sessions": sessions}
    return Outcome(together / alone, figures)


CASES = (
    Case("decode", 1.05, partial(replayed, decoding(48, **TOY))),
    Case("own_loop", None, partial(replayed, own_loop(48, **TOY))),
)

if __name__ == "__main__":
    main("Processor time of an executor per submission: 64 sessions over one", CASES)
