"""Measurement of a task: run it locally and on the server, twice each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from djinn_commands.demo.task import Advance, Task, Verdict

REMOTE = "remote_accelerator:0"


@attrs.frozen
class Findings:
    """What the annotation of programs recognised.

    Attributes:
        workloads: kinds of workload, such as `llm`.
        phases: phases, such as `llm_decode`.
        patterns: for each pattern, its largest number of matches in one program.
    """

    workloads: tuple[str, ...]
    phases: tuple[str, ...]
    patterns: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return short lines for the table: workloads, phases, then patterns. Return `nothing` if all are empty."""
        phases = (phase.removeprefix("llm_").replace("_", " ") for phase in self.phases if phase not in self.workloads)
        lines = [", ".join(self.workloads), ", ".join(phases)]
        lines += [f"{count} {name}" for name, count in sorted(self.patterns.items())]
        return [line for line in lines if line] or ["nothing"]


@attrs.frozen
class MeasuredRun:
    """Measurements of one run of a task: its seconds, and the counters of `djinn.stats()`."""

    seconds: float
    counters: Mapping[str, int]


@attrs.frozen
class Measured:
    """All measurements of one task.

    Attributes:
        name: name of the task.
        title: name of its model.
        verdict: comparison of the local and remote results.
        local_first: the first local run.
        local: the second local run.
        upload: the move of the model and its data to the server.
        remote_first: the first remote run, which plans and sends the templates.
        remote: the second remote run.
        recognised: what the annotation of the remote programs recognised.
        highlights: lines that show the remote result.
    """

    name: str
    title: str
    verdict: Verdict
    local_first: MeasuredRun
    local: MeasuredRun
    upload: MeasuredRun
    remote_first: MeasuredRun
    remote: MeasuredRun
    recognised: Findings
    highlights: tuple[str, ...]


# Called with a description before each step of the measurement. Returns a progress callback.
Announce = Callable[[str], Advance]


def measure(task: Task, announce: Announce) -> Measured:
    """Run `task` twice locally and twice on `remote_accelerator:0`. Compare both remote results with the first local result."""
    from djinn_client.runtime.client import record_plans

    task.move("cpu")
    here, first_local_run = _run(task, "cpu", announce(f"{task.title} here, first run"))
    _, local = _run(task, "cpu", announce(f"{task.title} here, second run"))
    announce(f"{task.title}: sending the weights")
    _, upload = _observed(lambda: _upload(task))
    with record_plans() as plans:
        first, first_remote_run = _run(task, REMOTE, announce(f"{task.title} on the server, first run"))
    there, remote = _run(task, REMOTE, announce(f"{task.title} on the server, second run"))
    return Measured(
        name=task.name,
        title=task.title,
        verdict=_worst(task.compare(here, there_result) for there_result in (first, there)),
        local_first=first_local_run,
        local=local,
        upload=upload,
        remote_first=first_remote_run,
        remote=remote,
        recognised=summarise([plan.profile for plan in plans]),
        highlights=tuple(task.highlights(there)),
    )


def _run(task: Task, device: str, advance: Advance) -> tuple[Any, MeasuredRun]:
    return _observed(lambda: task.run(device, advance))


def _observed(work: Callable[[], Any]) -> tuple[Any, MeasuredRun]:
    import djinn

    djinn.reset_stats()
    start = time.perf_counter()
    result = work()
    return result, MeasuredRun(time.perf_counter() - start, dict(djinn.stats()))


def _upload(task: Task) -> None:
    import djinn

    task.move(REMOTE)
    djinn.synchronize()


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    *earlier, last = verdicts
    return next((verdict for verdict in earlier if not verdict.equal), last)


def summarise(profiles: Sequence[Any]) -> Findings:
    """Return the merged findings of workload profiles, without the kinds `generic`, `unknown` and `forward`."""
    patterns: dict[str, int] = {}
    for profile in profiles:
        for name, count in profile.pattern_counts().items():
            patterns[name] = max(count, patterns.get(name, 0))
    workloads = {p.workload.value for p in profiles} - {"generic"}
    phases = {phase.value for p in profiles for phase in p.phases} - {"unknown", "forward"}
    return Findings(tuple(sorted(workloads)), tuple(sorted(phases)), patterns)
