"""A/B tests of optimizations: repeated programs of one structure alternate between plans with and without an optimization.

A test of a plan with substitutions starts when its total run time is much longer than planning. The program then
alternates between plans with and without the optimization, so that drift of the executor's speed affects both. A plugin's judge gets the
executor's times and decides. Rewrites that only drop nodes are not tested: they never take longer.
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
    from djinn_core.ir.graph import Graph
    from djinn_core.ir.result import PipelineResult, TrialTimes

MIN_RUNS: Final = 16  # runs of a plan before a test starts
PLANNING_PAYBACK: Final = 20  # minimum ratio of total run time to planning time
WARMUP_RUNS: Final = 2  # warm-up runs per arm
MAX_EXPERIMENTS: Final = 512  # limit of plans with test results
MAX_RUNS_PER_ARM: Final = 64  # runs per arm; without a verdict by then, the optimization stays
_log = get_logger("djinn.trials")
Without = Mapping[str, str]  # optimizations to leave out, each with the reason
NOTHING: Final[Without] = MappingProxyType({})
MakePlan = Callable[[Program, Without], PreparedTemplate]


def substituting_optimizations(result: PipelineResult) -> tuple[str, ...]:
    """Return the names of the optimizations with substitutions in a plan."""
    results = result.plan.results if result.plan is not None else ()
    return tuple(dict.fromkeys(r.optimization for r in results if r.applied and r.rewrite.substitutions))


class Verdicts:
    """Verdicts of trials of optimizations and placements, by program (topology and shapes)."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, str], dict[str, tuple[TrialTimes, str]]] = {}

    def switched_off(self, program: Program | Graph) -> Without:
        """Return the optimizations and placement policies that are switched off for this program, each with the reason."""
        return {name: reason for name, (_, reason) in self._verdicts_of(program).items() if reason} or NOTHING

    def measured(self, program: Program | Graph) -> dict[str, TrialTimes]:
        """Return the measured times by optimization or placement policy."""
        return {name: times for name, (times, _) in self._verdicts_of(program).items()}

    def _verdicts_of(self, program: Program | Graph) -> dict[str, tuple[TrialTimes, str]]:
        return self._verdicts.get(_key(program), {}) if self._verdicts else {}

    def add(self, program: Program, name: str, measured: TrialTimes, reason: str) -> None:
        """Record the trial of an optimization or placement policy. If `reason` is not empty, it is switched off."""
        self._verdicts.setdefault(_key(program), {})[name] = measured, reason

    def drop(self, program: Program, name: str) -> None:
        """Forget the trial of an optimization or placement policy."""
        self._verdicts_of(program).pop(name, None)


def _key(program: Program | Graph) -> tuple[str, str]:
    from djinn_core.ir.graph import Graph  # imported here, because only planning needs it

    graph = program if isinstance(program, Graph) else Graph(program)
    return graph.topology_hash, graph.shape_hash


class Variant(msgspec.Struct, eq=False):
    """One arm of an A/B test.

    Attributes:
        plan: the plan.
        seconds: the executor's run times, without the first `WARMUP_RUNS` runs.
        skipped: number of warm-up runs so far.
    """

    plan: PreparedTemplate
    seconds: list[float] = msgspec.field(default_factory=list)
    skipped: int = 0

    def note_seconds(self, seconds: float) -> None:
        """Record a run of `seconds` on the executor."""
        if self.skipped < WARMUP_RUNS:
            self.skipped += 1
        else:
            self.seconds.append(seconds)


class Experiment(msgspec.Struct, eq=False):
    """State of the A/B tests of one structure. The tests examine its optimizations one after the other.

    Attributes:
        plan: the plan with all optimizations.
        best: the best known plan.
        program: the first planned program.
        planning: planning time in seconds.
        names: names of untested optimizations. The first is tested next, or now.
        rejected: optimizations that slow the program down, with reasons.
        runs: number of runs before the first test.
        seconds: total seconds of these runs.
        arms: the arm with the optimization `names[0]` and the arm without it, or None if no test runs.
        test_runs: number of runs in tests.
    """

    plan: PreparedTemplate
    best: PreparedTemplate
    program: Program
    planning: float
    names: list[str]
    rejected: dict[str, str] = msgspec.field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0
    arms: tuple[Variant, Variant] | None = None
    test_runs: int = 0

    def note_seconds(self, seconds: float) -> None:
        """Record a run of `seconds` on the executor before the first test."""
        self.runs += 1
        self.seconds += seconds

    @property
    def worth_trying(self) -> bool:
        """Return True if the total run time is so long that the cost of another plan does not matter."""
        return self.runs >= MIN_RUNS and self.seconds >= PLANNING_PAYBACK * self.planning


class AbTests:
    """Select between plans of a repeated program. Not thread-safe: the caller holds the recorders' lock.

    Attributes:
        experiments: A/B tests by identity of the plan, which the experiment keeps alive.
    """

    def __init__(self, judge: Judge | None, make: MakePlan, stats: Stats, verdicts: Verdicts) -> None:
        """Begin without plans.

        Args:
            judge: decides which optimizations are faster. None: no test runs.
            make: plans a program without some optimizations.
            stats: counts tests.
            verdicts: receives the results.
        """
        self._judge, self._make, self._stats, self._verdicts = judge, make, stats, verdicts
        self.experiments: LruCache[int, Experiment] = LruCache(MAX_EXPERIMENTS)

    def begin(self, plan: PreparedTemplate, names: tuple[str, ...], planning: float, program: Program) -> None:
        """Register a new plan that took `planning` seconds, with the substitutions of the optimizations `names`."""
        if self._judge is None or not names:
            return
        experiment = Experiment(plan, plan, program, planning, list(names))
        for evicted in self.experiments.store(id(plan), experiment):
            evicted.plan.note_seconds = None
        plan.note_seconds = experiment.note_seconds

    def choose(self, plan: PreparedTemplate, program: Program) -> PreparedTemplate:
        """Return the plan to use for the next run of `program`: `plan`, which is valid for it, or the plan of an arm."""
        experiment = self.experiments.get(id(plan))
        if experiment is None:
            return plan
        if experiment.arms is None and experiment.names and experiment.worth_trying:
            self._begin_test(experiment, program)
        if experiment.arms is not None and self._is_settled(experiment, experiment.arms):
            experiment.arms = None
        plan_to_run = experiment.best
        if experiment.arms is not None:
            experiment.test_runs += 1
            plan_to_run = experiment.arms[
                experiment.test_runs % 4 in {2, 3}
            ].plan  # with, without, without, with: drift hits both alike
        return plan_to_run if plan_to_run is plan or plan_to_run.holds_for(program) else plan

    def _begin_test(self, experiment: Experiment, program: Program) -> None:
        """Start to test the first untested optimization."""
        name = experiment.names[0]
        plan_without = self._make(program, {**experiment.rejected, name: "A/B test: arm without it"})
        self._stats.optimizations_tried += 1
        experiment.arms = Variant(experiment.best), Variant(plan_without)
        for arm in experiment.arms:
            arm.plan.note_seconds = arm.note_seconds
        _log.debug("an A/B test of an optimization starts", optimization=name, instructions=len(program))

    def _is_settled(self, experiment: Experiment, arms: tuple[Variant, Variant]) -> bool:
        """Ask the judge about the current test, and apply the verdict. Return False if more runs are necessary."""
        from djinn_core.hookspecs.optimizations import Trial  # imported here, because only planning needs it
        from djinn_core.ir.result import TrialTimes

        assert self._judge is not None
        with_it, without = arms
        name = experiment.names[0]
        trial = Trial(name, tuple(with_it.seconds), tuple(without.seconds))
        pays = verdict_of(self._judge, partial(self._judge.pays, trial)) if trial.with_it and trial.without else None
        if pays is None and min(len(trial.with_it), len(trial.without)) < MAX_RUNS_PER_ARM:
            return False
        experiment.names.pop(0)
        for arm in arms:
            arm.plan.note_seconds = None
        measured = TrialTimes.of(trial.without, trial.with_it)
        fields = {"optimization": name, "with_ms": measured.after * 1e3, "without_ms": measured.before * 1e3}
        reason = reason_of(measured) if pays is False else ""
        self._verdicts.add(experiment.program, name, measured, reason)
        if not reason:
            _log.debug("an optimization is faster", **fields)
            return True
        _log.info("an optimization makes this program slower and is switched off", **fields)
        self._stats.optimizations_switched_off += 1
        experiment.rejected[name] = reason
        experiment.best = without.plan
        return True


def verdict_of(judge: object, ask: Callable[[], bool | None]) -> bool | None:
    """Return the verdict of the plugin `judge` that `ask` returns: True or False, or None if it needs more runs.

    If the judge fails, log the error and return True, which keeps the plan.
    """
    try:
        verdict = ask()
        if verdict is not None and not isinstance(verdict, bool):
            raise TypeError(f"a verdict must be True, False or None, not {verdict!r}")
    except Exception as error:
        from djinn_core.planning.stages.attribution import title  # imported here, because it imports the planner

        failure = f"{type(error).__name__}: {error}"
        plugin = title("optimization", judge)
        _log.warning(
            "a plugin failed in an A/B test", plugin=plugin, error=failure, instead="the optimization stays in the plan"
        )
        return True
    return verdict


def reason_of(measured: TrialTimes) -> str:
    """Return the reason why an optimization was switched off."""
    times = f"{measured.after * 1e3:.3g} ms with it, {measured.before * 1e3:.3g} ms without"
    return f"switched off by measurement: {times}, medians of {measured.runs} runs each"
