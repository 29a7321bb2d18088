"""Overview of a session for `djinn status` and dashboards: phase, steps, memory, and decisions of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from djinn_core.system.lru import LruCache
from djinn_core.wire.messages import ServingFigures, ValueHints
from djinn_server.running.values import ValueTable
from djinn_server.value_kinds import ValueKinds

DECISIONS_LIMIT: Final = 4  # latest plans whose decisions are shown
LINES_LIMIT: Final = 12  # shown lines of these plans together
_RUNS_LIMIT: Final = 16  # templates whose last run is recorded


@attrs.frozen
class SessionOverview:
    """Present facts about a session.

    Attributes:
        phase: phase of the last program, such as decode; empty if the client sent no hints.
        steps: number of the session's steps, such as decode or training steps. One template is chosen to count them.
        seconds: device time of the session's programs.
        kinds: bytes of values by kind, such as `weights`; empty if the client sent no hints.
        decisions: decisions of the latest plans with their reasons, as the client wrote them.
        shared: bytes of values that other sessions share.
        submissions: number of submissions.
        aside: bytes of evicted values in host memory, and on disk.
        serving: latency of requests.
    """

    phase: str = ""
    steps: int = 0
    seconds: float = 0.0
    kinds: Mapping[str, int] = attrs.field(factory=dict)
    decisions: tuple[str, ...] = ()
    shared: int = 0
    submissions: int = 0
    aside: tuple[int, int] = (0, 0)
    serving: ServingFigures = attrs.field(factory=ServingFigures)


class SessionNotes:
    """Statistics of a session's runs. `overview` is thread-safe. Only the session's thread calls other methods.

    Attributes:
        kinds: kinds of the session's values.
    """

    def __init__(self, values: ValueTable, *, at_once: bool = False) -> None:
        """`at_once`: as in `ValueKinds`."""
        self.kinds = ValueKinds(values, at_once=at_once)
        self._decisions: LruCache[bytes, tuple[str, ...]] = LruCache(DECISIONS_LIMIT)
        self._last_digest = self._step_digest = b""
        self._last_runs: LruCache[bytes, int] = LruCache(_RUNS_LIMIT)  # by template: number of its last run
        self._runs = 0
        self._steps = 0
        self._seconds = 0.0

    def learn(self, hints: ValueHints) -> None:
        """Learn the kinds of a template's values from the client's hints."""
        self.kinds.learn(hints)
        if hints.decisions:
            self._decisions.store(hints.digest, hints.decisions)

    def ran(self, digest: bytes, inputs: Sequence[int], outputs: Sequence[int], seconds: float) -> None:
        """Record a run of a template. `inputs`, `outputs`: handles. `seconds`: device time.

        A step is a run of one template. If another template recently ran more than twice as often, its runs count as steps.
        """
        self.kinds.ran(digest, inputs, outputs)
        is_repeated = digest == self._last_digest
        self._last_digest = digest
        self._seconds += seconds
        self._runs += 1
        last_run = self._last_runs
        if digest == self._step_digest:
            self._steps += 1
        elif digest in last_run and self._runs - last_run.get(self._step_digest, 0) > 2 * (
            self._runs - last_run[digest]
        ):
            self._step_digest = digest
        if is_repeated and digest in last_run:
            last_run[digest] = self._runs  # already the most recently used
        else:
            last_run.store(digest, self._runs)

    def overview(self) -> SessionOverview:
        """Return the overview, without the fields that the session itself adds."""
        decisions = [line for lines in reversed(list(self._decisions.values())) for line in lines]
        latest_decisions = tuple(dict.fromkeys(decisions))[:LINES_LIMIT]
        return SessionOverview(self.kinds.phase, self._steps, self._seconds, self.kinds.by_kind(), latest_decisions)
