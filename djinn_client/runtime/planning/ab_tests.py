"""A/B tests of optimizations: repeated programs of one structure run with and without an optimization in turn.

A plan with substitutions is tried once it has run often, and so long that planning it again is a small part of that. Then the
program runs with an optimization and without it in turn, so that drift of the executor affects both. A judge that a plugin
offers gets the executor's times and decides. Rewrites that only drop nodes are not tested: they never take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_client.runtime.stats import Stats
from djinn_core.ir.program import Program
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache

if TYPE_CHECKING:
    from djinn_core.hookspecs.optimizations import Judge
    from djinn_core.ir.graph import ProgramGraph
    from djinn_core.ir.result import Measured, PipelineResult

MIN_RUNS: Final = 16  # runs of a plan before anything is tried
PLANNING_PAYBACK: Final = 20  # as many times longer than planning must have been spent on running it
WARMUP_RUNS: Final = 2  # runs of each way that make memory and code ready
MAX_EXPERIMENTS: Final = 512  # plans that something is known of
MAX_RUNS_PER_ARM: Final = 64  # runs of each way; the optimization stays where the judge has not made up its mind
_log = get_logger("djinn.trials")
Without = Mapping[str, str]  # optimizations that are left out, each with the reason
NOTHING: Final[Without] = MappingProxyType({})
MakePlan = Callable[[Program, Without], PreparedTemplate]


def substituting_optimizations(result: PipelineResult) -> tuple[str, ...]:
    """Names of the optimizations whose substitutions are in a plan."""
    results = result.plan.results if result.plan is not None else ()
    return tuple(dict.fromkeys(r.optimization for r in results if r.applied and r.rewrite.substitutions))


class Verdicts:
    """What trials of optimizations and placements found, by program (topology and shapes)."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[str, tuple[Measured, str]]] = {}

    def about(self, program: Program | ProgramGraph) -> Without:
        """Optimizations and placements that are switched off for such a program, with reasons."""
        return {name: reason for name, (_, reason) in self._of(program).items() if reason} or NOTHING

    def measured(self, program: Program | ProgramGraph) -> dict[str, Measured]:
        """Measured times by optimization or placement policy."""
        return {name: measured for name, (measured, _) in self._of(program).items()}

    def _of(self, program: Program | ProgramGraph) -> dict[str, tuple[Measured, str]]:
        return self._known.get(_key(program), {}) if self._known else {}

    def add(self, program: Program, name: str, measured: Measured, reason: str) -> None:
        """Note a trial of an optimization or placement. A `reason` switches it off."""
        self._known.setdefault(_key(program), {})[name] = measured, reason

    def drop(self, program: Program, name: str) -> None:
        """Forget a trial."""
        self._of(program).pop(name, None)


def _key(program: Program | ProgramGraph) -> tuple[str, str]:
    from djinn_core.ir.graph import ProgramGraph  # with what plans

    graph = program if isinstance(program, ProgramGraph) else ProgramGraph(program)
    return graph.topology_hash, graph.shape_hash


class Variant(msgspec.Struct, eq=False):
    """One arm of a comparison: its plan, and the seconds that the executor took for it."""

    plan: PreparedTemplate
    seconds: list[float] = msgspec.field(default_factory=list)
    skipped: int = 0

    def took(self, seconds: float) -> None:
        """Record a run that took the executor `seconds`."""
        if self.skipped < WARMUP_RUNS:
            self.skipped += 1
        else:
            self.seconds.append(seconds)


class Experiment(msgspec.Struct, eq=False):
    """The plan of one structure, and what is found out about its optimizations, one after the other.

    Attributes:
        plan: with all of them. best: the one to use, as far as is known.
        program: the first one that was planned. planning: seconds that this took.
        names: optimizations that are still to be tried. out: those that make it slower, with reasons.
        runs, spent: how often it ran before anything was tried, and for how many seconds.
        arms: the two that are compared: with the first of `names`, and without. turn: runs since the comparison began.
    """

    plan: PreparedTemplate
    best: PreparedTemplate
    program: Program
    planning: float
    names: list[str]
    out: dict[str, str] = msgspec.field(default_factory=dict)
    runs: int = 0
    spent: float = 0.0
    arms: tuple[Variant, Variant] | None = None
    turn: int = 0

    def took(self, seconds: float) -> None:
        """Record a run, before anything is tried, that took the executor `seconds`."""
        self.runs += 1
        self.spent += seconds

    @property
    def worth_trying(self) -> bool:
        """True if the program has run so often and so long that the cost of one more plan does not matter."""
        return self.runs >= MIN_RUNS and self.spent >= PLANNING_PAYBACK * self.planning


class AbTests:
    """Chooses between ways to run a program that has come before. Not thread-safe: the recorders' lock is held around it."""

    def __init__(self, judge: Judge | None, make: MakePlan, stats: Stats, verdicts: Verdicts) -> None:
        """`make`: plans a program without some of the optimizations."""
        self._judge, self._make, self._stats, self._verdicts = judge, make, stats, verdicts
        self.tried: LruCache[int, Experiment] = LruCache(
            MAX_EXPERIMENTS
        )  # by identity of its plan, which it keeps alive

    def begin(self, plan: PreparedTemplate, names: tuple[str, ...], planning: float, program: Program) -> None:
        """Register a new plan that took `planning` seconds, with the substitutions of the optimizations `names`."""
        if self._judge is None or not names:
            return
        tried = Experiment(plan, plan, program, planning, list(names))
        for evicted in self.tried.store(id(plan), tried):
            evicted.plan.took = None
        plan.took = tried.took

    def choose(self, plan: PreparedTemplate, program: Program) -> PreparedTemplate:
        """The plan to use in the place of `plan`, which holds for `program`."""
        tried = self.tried.get(id(plan))
        if tried is None:
            return plan
        if tried.arms is None and tried.names and tried.worth_trying:
            self._open(tried, program)
        if tried.arms is not None and self._is_settled(tried, tried.arms):
            tried.arms = None
        chosen = tried.best
        if tried.arms is not None:
            tried.turn += 1
            chosen = tried.arms[tried.turn % 4 in {2, 3}].plan  # with, without, without, with: drift hits both alike
        return chosen if chosen is plan or chosen.holds_for(program) else plan

    def _open(self, tried: Experiment, program: Program) -> None:
        """Begin to run without the first optimization that is left to try."""
        name = tried.names[0]
        other = self._make(program, {**tried.out, name: "it is tried without"})
        self._stats.optimizations_tried += 1
        tried.arms = Variant(tried.best), Variant(other)
        for arm in tried.arms:
            arm.plan.took = arm.took
        _log.debug("an optimization is tried", optimization=name, instructions=len(program))

    def _is_settled(self, tried: Experiment, arms: tuple[Variant, Variant]) -> bool:
        """Ask the judge, and do as it says; False if more runs are needed."""
        from djinn_core.hookspecs.optimizations import Trial  # with what plans
        from djinn_core.ir.result import Measured

        assert self._judge is not None
        ours, other = arms
        name = tried.names[0]
        trial = Trial(name, tuple(ours.seconds), tuple(other.seconds))
        pays = verdict_of(self._judge, partial(self._judge.pays, trial)) if trial.with_it and trial.without else None
        if pays is None and min(len(trial.with_it), len(trial.without)) < MAX_RUNS_PER_ARM:
            return False
        tried.names.pop(0)
        for arm in arms:
            arm.plan.took = None
        measured = Measured.of(trial.without, trial.with_it)
        told = {"optimization": name, "with_ms": measured.after * 1e3, "without_ms": measured.before * 1e3}
        reason = reason_of(measured) if pays is False else ""
        self._verdicts.add(tried.program, name, measured, reason)
        if not reason:
            _log.debug("an optimization pays", **told)
            return True
        _log.info("an optimization does not pay here and is switched off", **told)
        self._stats.optimizations_switched_off += 1
        tried.out[name] = reason
        tried.best = other.plan
        return True


def verdict_of(judge: object, ask: Callable[[], bool | None]) -> bool | None:
    """Return the verdict of a plugin's judge. If the judge fails, log it and return True, which keeps the plan."""
    try:
        verdict = ask()
        if verdict is not None and not isinstance(verdict, bool):
            raise TypeError(f"a verdict is True, False or None, not {verdict!r}")
    except Exception as error:
        from djinn_core.planning.stages.attribution import title  # imports the planner

        failure = f"{type(error).__name__}: {error}"
        judged = title("optimization", judge)
        _log.warning("a plugin failed and is left out", plugin=judged, error=failure, instead="the plan stays as it is")
        return True
    return verdict


def reason_of(measured: Measured) -> str:
    """Reason why an optimization was switched off."""
    times = f"{measured.after * 1e3:.3g} ms with it, {measured.before * 1e3:.3g} ms without"
    return f"switched off by measurement: {times}, medians of {measured.runs} runs each"
