"""State machine of one template's compilation: cold, hot, compiling, checked, timed, then adopted or rejected.

In each run, the present phase may replace the instructions of a region. Then it chooses the next phase. The arbiter
measures the times. Sessions run one at a time, so they make all transitions but one: the compiling thread makes the
transition from compiling to checking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_server.hookspecs.run_strategies import Replacement, RunOffer, Stage, StrategyRun
from djinn_server.memory.room import is_out_of_memory
from djinn_server.running.arbiter import ServedRun
from djinn_server.running.compiled_step import Environment
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_strategies.compiling.comparison import difference
from djinn_strategies.compiling.compiled_region import CompiledRegion, inputs_getter, slots_of
from djinn_strategies.compiling.region import Region, find_region
from djinn_strategies.compiling.scalars import liftable_slots
from djinn_strategies.compiling.sizes import NonlinearSlots, ObservedRun, SizeRelation, infer_size_relation, observe
from djinn_strategies.compiling.written_views import WrittenView, written_views

_log = get_logger("djinn.server")


@attrs.frozen
class Thresholds:
    """Thresholds for compiling a template and for adopting the compiled code.

    A template is hot once it reaches `runs` and `seconds`, or else `long_runs` and `long_seconds`.

    Attributes:
        runs: least number of runs of a fast template.
        seconds: least total time of these runs.
        long_runs: least number of runs of a slow template.
        long_seconds: least total time of these runs.
        observed: number of runs from which the relation of the sizes is inferred.
        checks: number of runs in which compiled code must give equal results before it is timed.
        misses: after this many consecutive runs that do not fit, compiled code is dropped. After this many consecutive
            comparisons that raise, the template is never compiled again.
        tries: maximum number of compilations of a template.
    """

    runs: int = 16
    seconds: float = 0.05
    long_runs: int = 4
    long_seconds: float = 2.0
    observed: int = 3
    checks: int = 2
    misses: int = 32
    tries: int = 3


@attrs.define
class CompilationCounters:
    """Counters of the compilations for one device. Session threads and the compiling thread increment them.

    Attributes:
        compilations: number of calls of compilers.
        seconds: total time of these calls.
        failures: number of calls that raised.
        unused: number of compiled regions that were rejected or dropped: for different results, no speedup, or changed
            sizes.
        runs: number of runs in which compiled code replaced instructions.
    """

    compilations: int = 0
    seconds: float = 0.0
    failures: int = 0
    unused: int = 0
    runs: int = 0


class Phase(Protocol):
    """A phase of a template's compilation.

    Attributes:
        stage: name of the phase for the arbiter, as in `RunOffer.stage`.
        region: instructions that the phase observes or replaces.
    """

    stage: ClassVar[Stage]

    @property
    def region(self) -> Region | None:
        """The instructions that the phase observes or replaces."""

    def try_run(self, env: Environment) -> bool:
        """Compute the region, and store its results in `env`.

        Return False if nothing was written, and the instructions have to run instead.

        Raises:
            WrittenError: the compiled code failed and may have written into its inputs.
        """

    def after_run(self, seconds: float, /) -> None:
        """Count a run of `seconds`, as in `RunOffer.ran`, and enter the next phase if this phase is complete."""


@attrs.frozen
class CompilationJob:
    """A region to compile, with the facts that a compiler needs.

    Attributes:
        hot: state of the template. It receives the result.
        template: the template.
        region: the instructions to compile.
        relation: how the sizes vary between runs.
        share: the template's running time as a share of the time since its first run: the largest possible saving.
        aliases: inputs that alias memory which the region writes.
        compiler: index of the compiler to call.
    """

    hot: HotTemplate
    template: CompiledTemplate
    region: Region
    relation: SizeRelation
    share: float = 0.0
    aliases: tuple[WrittenView, ...] = ()
    compiler: int = 0


class WrittenError(DjinnError):
    """A compiled region failed and may have written into its inputs."""


@attrs.define(eq=False)
class HotTemplate(RunOffer):
    """State of one template on one device. All sessions that run the template share it.

    Attributes:
        template: the template.
        thresholds: when to compile the template and when to adopt the result.
        submit: `HotTemplates.submit` of the run strategy.
        name: the first digits of the template's digest, for logs.
        counts: counters of the device.
        tries: number of compilations so far.
        slots: numeric arguments of the latest run.
        skipped: ops that a region may contain but that run separately, as in `find_region`.
        maybe_dynamic: ops that a region may contain although result sizes may depend on data, as in `find_region`.
        counters: True if `n` may be a slot when no size varies, as in `infer_size_relation`.
        checked: True, because the phases compare results, as in `RunOffer.checked`.
        refusal: why the template runs uncompiled, as in `RunOffer.refusal`.
        phase: the present phase.
    """

    template: CompiledTemplate
    thresholds: Thresholds
    submit: Callable[[CompilationJob], None]
    name: str = ""
    counts: CompilationCounters = attrs.field(factory=CompilationCounters)
    tries: int = 0
    slots: Sequence[Any] = ()
    skipped: frozenset[str] = frozenset()
    maybe_dynamic: frozenset[str] = frozenset()
    counters: bool = False
    checked: bool = attrs.field(init=False, default=True)
    refusal: str = attrs.field(init=False, default="")
    phase: Phase = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.phase = ColdPhase(self)

    def stage(self) -> Stage:
        """Name of the present phase, as in `RunOffer.stage`."""
        return self.phase.stage

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the template, as `RunOffer.run` does."""
        assert isinstance(run, ServedRun)
        self.slots = run.slots
        if isinstance(self.phase, HotPhase):
            self.phase.find_region()
        phase = self.phase
        region = phase.region
        if region is None:
            return
        yield from run.advance(region.start)
        compiled = phase.compiled if isinstance(phase, TimingPhase | AdoptedPhase) else None
        growing = compiled.growing_inputs if compiled is not None else ()
        run.run.densify([place for index, place in enumerate(region.inputs) if index not in growing])
        if run.step == region.start and run.is_replaceable():
            try:
                if phase.try_run(run.run.env):
                    run.skip_to(region.stop)
                    if compiled is not None:
                        run.run.outcome.may_round_differently |= compiled.may_round_differently
                        run.run.grown = dict.fromkeys(compiled.growing_results, compiled)
            except WrittenError as error:
                run.run.fail(region.stop, error)

    def replacement(self) -> Replacement | None:
        """Return the compiled region if it is adopted, as `RunOffer.replacement` does."""
        phase = self.phase
        if not isinstance(phase, AdoptedPhase):
            return None
        return Replacement(phase.region.start, phase.region.stop, phase.try_run)

    def ran(self, seconds: float) -> None:
        """Count a run, as `RunOffer.ran` does."""
        self.phase.after_run(seconds)

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:
        """Adopt or reject the compiled code by the result of the arbiter's trial, as `RunOffer.decided` does."""
        phase = self.phase
        if not isinstance(phase, TimingPhase):
            return
        if used:
            self.adopt(phase.job, phase.compiled, ratio)
        else:
            self.try_next_compiler(phase.job, phase.compiled.compiler, reason)

    def start_checking(self, job: CompilationJob, compiled: CompiledRegion) -> None:
        """Enter the phase that checks `compiled`. The compiling thread calls this."""
        self.phase = CheckingPhase(self, job, compiled)

    def start_compiling(self, job: CompilationJob) -> None:
        """Submit a compilation job."""
        self.phase = CompilingPhase()  # before `submit`: the compiling thread may set the next phase at once
        self.submit(job)

    def give_up(self, reason: str) -> None:
        """Run the template uncompiled from now on."""
        self._count_unused()
        self._report("a template runs uncompiled", reason=reason)
        self.phase, self.refusal = NotCompiledPhase(), reason

    def try_next_compiler(self, job: CompilationJob, compiler: str, reason: str) -> None:
        """Reject the result of `compiler`, log `reason`, and submit the job to the next compiler."""
        self._count_unused()
        self._report("a compiled template is not used", compiler=compiler, reason=reason)
        self.refusal = reason
        self.start_compiling(attrs.evolve(job, compiler=job.compiler + 1))

    def restart(self, reason: str) -> None:
        """Drop the compiled code, and count the template's runs anew. If `Thresholds.tries` is reached, give up."""
        self.tries += 1
        if self.tries >= self.thresholds.tries:
            self.give_up(reason)
            return
        self._count_unused()
        self._report("a template will be compiled again once it is hot", reason=reason)
        self.phase = ColdPhase(self)

    def give_up_region(self, job: CompilationJob, reason: str) -> None:
        """Choose another region if this one contains ops whose result sizes may depend on data; otherwise give up."""
        if self.maybe_dynamic.isdisjoint(step.op for step in self.template.steps[job.region.start : job.region.stop]):
            self.give_up(reason)
        else:
            self.maybe_dynamic = frozenset()
            self.phase = HotPhase(self, job.share)

    def adopt(self, job: CompilationJob, compiled: CompiledRegion, ratio: float) -> None:
        """Adopt the compiled code. `ratio`: its time, divided by the time of the instructions."""
        grows = "no" if job.relation.base is None else "yes"
        self._report("a template is compiled", compiler=compiled.compiler, time_ratio=round(ratio, 3), grows=grows)
        self.phase, self.refusal = AdoptedPhase(self, job, compiled), ""

    def _count_unused(self) -> None:
        self.counts.unused += isinstance(self.phase, _RegionPhase)

    def _report(self, event: str, **fields: object) -> None:
        _log.info(event, template=self.name, instructions=len(self.template.steps), **fields)


class NotCompiledPhase:
    """Phase of a template that runs uncompiled: permanently, or until a compiler returns."""

    stage: ClassVar[Stage] = "idle"
    region: Region | None = None

    def try_run(self, _: Environment, /) -> bool:
        """Let the instructions run."""
        return False

    def after_run(self, _: float, /) -> None:
        """Stay in this phase."""


class CompilingPhase(NotCompiledPhase):
    """Phase of a template that a compiler is working on."""


@attrs.define(eq=False)
class ColdPhase(NotCompiledPhase):
    """First phase of a template: count its runs and their time."""

    hot: HotTemplate
    runs: int = 0
    seconds: float = 0.0
    since: float = attrs.field(factory=time.perf_counter)

    def after_run(self, seconds: float, /) -> None:
        """Count a run. The template becomes hot once its runs and their total time reach the thresholds."""
        self.runs += 1
        self.seconds += seconds
        if not self._is_hot():
            return
        share = self.seconds / max(time.perf_counter() - self.since, self.seconds)
        self.hot.phase = HotPhase(self.hot, share)

    def _is_hot(self) -> bool:
        limits, factor = self.hot.thresholds, float(4**self.hot.tries)
        runs, seconds = self.runs / factor, self.seconds / factor
        often = runs >= limits.runs and seconds >= limits.seconds
        return often or (runs >= limits.long_runs and seconds >= limits.long_seconds)


@attrs.define(eq=False)
class HotPhase(NotCompiledPhase):
    """Phase of a hot template until its next run, whose numeric arguments show which ops draw random numbers."""

    stage: ClassVar[Stage] = "watching"
    hot: HotTemplate
    share: float

    def find_region(self) -> None:
        """Find the region to compile, and start to observe it. Give up if the template has no such region."""
        region = find_region(
            self.hot.template, self.hot.slots, skipped=self.hot.skipped, maybe_dynamic=self.hot.maybe_dynamic
        )
        if region is None:
            self.hot.give_up("it has too few consecutive ops that can be compiled")
        else:
            self.hot.phase = ObservingPhase(self.hot, region, self.share)


class ObservingPhase:
    """Phase that observes how sizes and numeric arguments differ between runs."""

    stage: ClassVar[Stage] = "watching"

    def __init__(self, hot: HotTemplate, region: Region, share: float, nonlinear: frozenset[int] = frozenset()) -> None:
        """Observe `region`.

        `nonlinear`: slots whose instructions were removed from the region, because they vary nonlinearly.
        """
        self.hot, self.region, self._share, self._nonlinear = hot, region, share, nonlinear
        self._inputs, self._slots = inputs_getter(region), slots_of(hot.template)
        self._observed_runs: list[ObservedRun] = []
        self._aliases: tuple[WrittenView, ...] = ()  # of the latest run
        self._unsupported = 0

    def try_run(self, env: Environment) -> bool:
        """Record the sizes and numbers of a run. The instructions run as usual."""
        tensors = self._inputs(env)
        observed_run = observe(tensors, env[self._slots])
        if observed_run is None:
            self._unsupported += 1
        else:
            self._observed_runs.append(observed_run)
            self._aliases = written_views(self.region, tensors)
        return False

    def after_run(self, _: float, /) -> None:
        """Start the compilation once enough runs were observed."""
        if self._unsupported >= self.hot.thresholds.misses:
            self.hot.give_up("its inputs are not plain tensors of real numbers")
        elif len(self._observed_runs) >= self.hot.thresholds.observed:
            # If compiled code was dropped before, perhaps because of a rarely changing number, float slots may vary now.
            template, region = self.hot.template, self.region
            relation = infer_size_relation(
                self._observed_runs,
                liftable_slots(template, region),
                not self.hot.tries,
                region.slots,
                counters=self.hot.counters,
            )
            if isinstance(relation, SizeRelation):
                self.hot.start_compiling(
                    CompilationJob(self.hot, template, region, relation, self._share, self._fixed_aliases(relation))
                )
            elif not (isinstance(relation, NonlinearSlots) and self._exclude_slots(relation.slots)):
                self.hot.restart("its sizes or numbers change from run to run, and not linearly with one size")

    def _exclude_slots(self, slots: frozenset[int]) -> bool:
        """Observe a region without the instructions of `slots`. Return False if no such region is long enough."""
        nonlinear = self._nonlinear | slots
        region = find_region(self.hot.template, self.hot.slots, nonlinear, self.hot.skipped, self.hot.maybe_dynamic)
        if region is not None:
            self.hot.phase = ObservingPhase(self.hot, region, self._share, nonlinear)
        return region is not None

    def _fixed_aliases(self, relation: SizeRelation) -> tuple[WrittenView, ...]:
        """Return the aliases between inputs whose sizes and strides are constant."""
        varying = {*relation.sizes, *relation.strides}
        return tuple([alias for alias in self._aliases if varying.isdisjoint((alias.view, alias.base))])


class _RegionPhase:
    """Base of the phases that have a compiled region."""

    stage: ClassVar[Stage] = "watching"

    def __init__(self, hot: HotTemplate, job: CompilationJob, compiled: CompiledRegion) -> None:
        self.hot, self.job, self.compiled = hot, job, compiled
        self.region = job.region
        self._consecutive_misses = 0
        self._failed_comparisons = 0  # consecutive comparisons that raised
        self._comparison_error = ""

    def check_guard(self, env: Environment) -> int | None:
        """Return the result of `CompiledRegion.check_guard`, and count consecutive runs that do not fit."""
        try:
            n = self.compiled.check_guard(env)
        except Exception as error:
            if not is_out_of_memory(error):
                name = "" if isinstance(error, DjinnError) else f"{type(error).__name__}: "
                self.hot.give_up_region(self.job, f"it cannot be recorded: {name}{error}")
            n = None
        self._consecutive_misses = self._consecutive_misses + 1 if n is None else 0
        return n

    def missed_too_often(self) -> bool:
        """Return True after `misses` consecutive runs that did not fit the compiled region."""
        return self._consecutive_misses >= self.hot.thresholds.misses

    def compare(self, env: Environment) -> str | None:
        """Return how the compiled results differ, as `difference` does, or None if the comparison raises."""
        try:
            self.compiled.copy_overwritten_inputs(env)
            difference_text = difference(self.compiled, env)
        except Exception as error:
            _log.debug("results cannot be compared", template=self.hot.name, error=repr(error))
            self._failed_comparisons, self._comparison_error = (
                self._failed_comparisons + 1,
                f"{type(error).__name__}: {error}",
            )
            return None
        self._failed_comparisons = 0
        return difference_text

    def stops_comparing(self) -> bool:
        """Give up after `misses` consecutive comparisons that raised. Return True in this case."""
        if self._failed_comparisons < self.hot.thresholds.misses:
            return False
        self.hot.give_up(f"comparing its results failed {self._failed_comparisons} times: {self._comparison_error}")
        return True

    def run_compiled(self, env: Environment) -> bool:
        """Run the compiled code. If it raises, give up, and return False so that the instructions run.

        Raises:
            WrittenError: the compiled code failed and may have written into its inputs.
        """
        try:
            self.compiled.run(env)
        except Exception as error:
            self.hot.give_up(f"its compiled code raised {type(error).__name__}: {error}")
            if self.region.written_inputs or self.compiled.may_have_overwritten:
                raise WrittenError(
                    f"code that {self.compiled.compiler} compiled for these ops raised {type(error).__name__}: {error}"
                ) from error
            return False
        self.hot.counts.runs += 1
        return True


class CheckingPhase(_RegionPhase):
    """Phase that compares the results of the compiled code with the results of the instructions."""

    def __init__(self, hot: HotTemplate, job: CompilationJob, compiled: CompiledRegion) -> None:
        super().__init__(hot, job, compiled)
        self._equal_sizes: list[int] = []
        self._difference = ""

    def try_run(self, env: Environment) -> bool:
        """Compare the results if the run fits. Return False, so that the instructions run."""
        n = self.check_guard(env)
        difference_text = None if n is None else self.compare(env)
        if n is not None and difference_text is not None:
            self._difference = difference_text
            self._equal_sizes.append(n)
        return False

    def after_run(self, _: float, /) -> None:
        """Enter the timing phase after enough equal results, or reject compiled code with other results."""
        if self._difference:
            self.hot.try_next_compiler(self.job, self.compiled.compiler, self._difference)
        elif self.missed_too_often():
            self.hot.restart("later runs had other sizes or numbers than the observed ones")
        elif not self.stops_comparing() and len(self._equal_sizes) >= self.hot.thresholds.checks:
            self.hot.phase = TimingPhase(self.hot, self.job, self.compiled)


class TimingPhase(_RegionPhase):
    """Phase in which the arbiter times compiled code and instructions alternately."""

    stage: ClassVar[Stage] = "ready"

    def try_run(self, env: Environment) -> bool:
        """Run the compiled code if it fits the run."""
        return self.check_guard(env) is not None and self.run_compiled(env)

    def after_run(self, _: float, /) -> None:
        """Drop the compiled code after too many consecutive runs that did not fit."""
        if self.missed_too_often():
            self.hot.restart("later runs had other sizes or numbers than the timed ones")


class AdoptedPhase(_RegionPhase):
    """Last phase: the compiled code replaces the instructions."""

    stage: ClassVar[Stage] = "ready"

    def __init__(self, hot: HotTemplate, job: CompilationJob, compiled: CompiledRegion) -> None:
        super().__init__(hot, job, compiled)
        self._compared_magnitudes: set[int] = set()  # powers of two
        self._difference = ""

    def try_run(self, env: Environment) -> bool:
        """Run the compiled code if it fits the run.

        If no run whose `n` has as many binary digits was compared yet, only compare the results, and return False.
        """
        n = self.check_guard(env)
        if n is None:
            return False
        if n.bit_length() not in self._compared_magnitudes:
            difference_text = self.compare(env)
            if difference_text is not None:
                self._difference = difference_text
                self._compared_magnitudes.add(n.bit_length())
            return False
        return self.run_compiled(env)

    def after_run(self, _: float, /) -> None:
        """Drop the compiled code after different results, or after too many consecutive runs that did not fit."""
        if self._difference:
            self.hot.give_up(f"compiled code returned different results for a new size: {self._difference}")
        elif not self.stops_comparing() and self.missed_too_often():
            self.hot.restart("recent runs do not have the sizes or numbers that it was compiled for")
