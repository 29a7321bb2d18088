"""Runs a task here and on the server, and keeps what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from djinn_core.demo.task import Advance, Task, Verdict

REMOTE = "remote_accelerator:0"


@attrs.frozen
class Recognised:
    """What the semantic stages saw: kinds of workload, phases, and the most matches of each pattern in one program."""

    workloads: tuple[str, ...]
    phases: tuple[str, ...]
    patterns: Mapping[str, int]

    def __str__(self) -> str:
        counted = [f"{name} x{count}" for name, count in sorted(self.patterns.items())]
        return "; ".join(", ".join(part) for part in (self.workloads, self.phases, counted) if part) or "nothing"


@attrs.frozen
class Measured:
    """One task, both ways. Times in seconds, each the first run; sizes in bytes.

    Attributes:
        upload_seconds: bringing the model to the server.
        counters: what `djinn.stats()` counted during the remote run, the upload left out.
        upload_counters: the same for the upload.
    """

    title: str
    verdict: Verdict
    local_seconds: float
    remote_seconds: float
    upload_seconds: float
    counters: Mapping[str, int]
    upload_counters: Mapping[str, int]
    recognised: Recognised
    highlights: tuple[str, ...]


# Called before each of the two runs with a few words; the callback that it returns is told of progress.
Announce = Callable[[str], Advance]


def measure(task: Task, announce: Announce) -> Measured:
    """Run `task` locally, then on `remote_accelerator:0`, and compare."""
    import djinn
    from djinn_core.runtime.client import record_plans

    task.move("cpu")
    local, local_seconds = _timed(lambda: task.run("cpu", announce(f"{task.title}, here")))
    advance = announce(f"{task.title}, remotely")
    djinn.reset_stats()
    _, upload_seconds = _timed(lambda: _upload(task))
    upload_counters = dict(djinn.stats())
    djinn.reset_stats()
    with record_plans() as plans:
        remote, remote_seconds = _timed(lambda: task.run(REMOTE, advance))
    counters = dict(djinn.stats())
    return Measured(
        title=task.title,
        verdict=task.compare(local, remote),
        local_seconds=local_seconds,
        remote_seconds=remote_seconds,
        upload_seconds=upload_seconds,
        counters=counters,
        upload_counters=upload_counters,
        recognised=summarise([plan.profile for plan in plans]),
        highlights=tuple(task.highlights(remote)),
    )


def _upload(task: Task) -> None:
    import djinn

    task.move(REMOTE)
    djinn.synchronize()


def summarise(profiles: Sequence[Any]) -> Recognised:
    """What several profiles say together; unknown and generic count as nothing."""
    patterns: dict[str, int] = {}
    for profile in profiles:
        for name, count in profile.pattern_counts().items():
            patterns[name] = max(count, patterns.get(name, 0))
    workloads = {p.workload.value for p in profiles} - {"generic"}
    phases = {phase.value for p in profiles for phase in p.phases} - {"unknown", "forward"}
    return Recognised(tuple(sorted(workloads)), tuple(sorted(phases)), patterns)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
