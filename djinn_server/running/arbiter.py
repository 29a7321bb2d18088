"""Arbiter: decide for each run of a template which run strategy executes it.

Each strategy makes an offer for a template. In a trial, the arbiter compares the offer's results with those of the
ops, and times both in turns. Afterwards it uses the offer with the least device time.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from djinn_core.errors import ProtocolError, QuotaExceeded, TransportError
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.logs import get_logger
from djinn_core.system.lru import LruCache
from djinn_core.torch_private import inference_mode, storage_key
from djinn_core.wire.messages import TemplateDecision
from djinn_server.hookspecs.run_strategies import (
    RunOffer,
    RunResults,
    RunStrategy,
    Stage,
    StrategyRun,
    TemplateFacts,
    TemplateOp,
)
from djinn_server.memory.room import is_out_of_memory
from djinn_server.running.cached_results import CacheableOps, CacheableRun, cacheable_ops
from djinn_server.running.device_time import DeviceTimer, TimedSpans
from djinn_server.running.fair_share import Steps
from djinn_server.running.random_state import default_generator
from djinn_server.running.result_layout import layout_difference
from djinn_server.running.run import TemplateRun, numbers_of
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import Poison, memory_of

TEMPLATES: Final = 1024
_ENDED: Final = object()
_T = TypeVar("_T")
_log = get_logger("djinn.server")


class UnfitRun(Exception):  # noqa: N818 - ends an offer's part in a run
    """A strategy cannot be used for this run, but perhaps for the next one."""


@attrs.frozen
class TrialLimits:
    """Limits of a trial.

    Attributes:
        checks: number of runs whose results must have been equal.
        timed: number of runs to time, with the ops and with the offer.
        plain: number of timed runs that suffice if each run of the offer is faster than each run of the ops.
        gain: an offer is used if its time is at most this share of the time op by op.
        fruitless: consecutive runs without a replacement after which an offer is not used.
    """

    checks: int = 2
    timed: int = 8
    plain: int = 3
    gain: float = 0.95
    fruitless: int = 16

    def ratio(self, before: Sequence[float], offered: Sequence[float]) -> float | None:
        """Return the ratio of the offer's time to the time op by op; None while more runs are needed.

        Only the fastest run of each counts, because slow runs on a busy machine include preemption.
        """
        plainly = len(offered) >= self.plain and max(offered) < self.gain * min(before)
        return min(offered) / max(min(before), 1e-9) if plainly or len(offered) >= self.timed else None


@attrs.define(eq=False)
class Candidate:
    """A strategy's offer for a template, with the measurements of its trial.

    Attributes:
        checked: number of runs whose results were compared.
        given: storages of the compared results.
        fruitless: consecutive runs in which the offer replaced nothing.
        before: device seconds of trial runs op by op.
        offered: device seconds of the offer in trial runs.
        ratio: time of the offer divided by the time op by op; 1.0 before a trial.
        used: True if the offer is used; None while this is not decided.
        reason: why the offer is not used.
    """

    strategy: RunStrategy
    offer: RunOffer
    checked: int = 0
    given: dict[int, StorageWeakRef] = attrs.field(factory=dict)
    fruitless: int = 0
    before: list[float] = attrs.field(factory=list)
    offered: list[float] = attrs.field(factory=list)
    ratio: float = 1.0
    used: bool | None = None
    reason: str = ""
    failed: bool = False

    def reset(self) -> None:
        """Discard the measurements, because the offer was replaced or withdrawn."""
        self.checked, self.fruitless, self.used, self.ratio = 0, 0, None, 1.0
        self.given, self.before, self.offered = {}, [], []


@attrs.frozen
class ServedFacts(TemplateFacts):
    """The facts about a template that strategies receive, with the compiled template."""

    template: CompiledTemplate = attrs.field(kw_only=True)
    digest: bytes = attrs.field(kw_only=True)
    cacheable_ops: CacheableOps | None = attrs.field(kw_only=True, default=None)


class TemplateChoice:
    """A template on a device, with the offers that can run it.

    Attributes:
        facts: facts about the template.
        candidates: offers in the order of their trials.
        caches: offers that reuse results of earlier runs.
        joint: the offer that runs the template for several sessions at once.
        has_exact: True if an offer may run the template for sessions that need bitwise equal results.
    """

    def __init__(self, facts: ServedFacts, candidates: Sequence[Candidate], timer: DeviceTimer) -> None:
        self.facts, self.name = facts, facts.digest.hex()[:8]
        self.joint = next((possible for possible in candidates if possible.strategy.joins_sessions), None)
        alone = [possible for possible in candidates if not possible.strategy.joins_sessions]
        self.candidates = [possible for possible in alone if not possible.strategy.caches_results]
        self.caches = [possible for possible in alone if possible.strategy.caches_results]
        self.spans = TimedSpans(timer)
        self.has_exact = any(candidate.strategy.exact for candidate in alone)

    def cache(self, *, exact: bool) -> Candidate | None:
        """Return the offer that may reuse results of an earlier run; None if there is none."""
        usable = (
            cache for cache in self.caches if self.stage(cache) == "ready" and (cache.strategy.exact or not exact)
        )
        return next(usable, None)

    def next(self, *, exact: bool) -> Candidate | None:
        """Return the offer for the next run: one in trial, else the fastest one. None: run op by op."""
        fastest = None
        for candidate in self.candidates:
            if candidate.failed or (exact and not candidate.strategy.exact):
                continue
            if (stage := self.stage(candidate)) != "ready":
                candidate.reset()
            if stage == "idle":
                continue
            if stage == "watching" or candidate.used is None:
                return candidate
            if candidate.used is not False and (fastest is None or candidate.ratio < fastest.ratio):
                fastest = candidate
        return fastest

    def stage(self, candidate: Candidate) -> Stage:
        """Return the stage of an offer, as `RunOffer.stage`; `idle` if the offer has failed."""
        return "idle" if candidate.failed else self._call_offer(candidate, candidate.offer.stage) or "idle"

    def _call_offer(self, candidate: Candidate, call: Callable[[], _T]) -> _T | None:
        """Call a method of an offer outside of a run. If it raises, return None and do not use the offer again."""
        try:
            return call()
        except Exception as error:
            self.failed(candidate, error)
            return None

    def failed(self, candidate: Candidate, error: Exception) -> None:
        """Do not use a candidate again, because its offer raised an error."""
        if not candidate.failed:
            candidate.failed = True
            self.refuse(candidate, f"the strategy raised {type(error).__name__}: {error}")

    def decisions(self) -> Iterator[TemplateDecision]:
        """Yield what is decided about each strategy for this template."""
        ops = self.facts.template.count
        for candidate in (*self.candidates, *self.caches):
            name, reason = candidate.strategy.name, candidate.reason or candidate.offer.refusal
            if candidate.used:
                yield TemplateDecision(self.name, ops, name, f"used: it takes {candidate.ratio:.2f} of the time")
            elif reason:
                yield TemplateDecision(self.name, ops, name, f"not used: {reason}")

    def is_replaced(self) -> bool:
        """True if an offer has been found to be faster than the ops."""
        return any(candidate.used for candidate in self.candidates)

    def ran(self, seconds: float) -> None:
        """Add device seconds that the template took since the last call."""
        for candidate in self.candidates:
            if not candidate.failed:
                self._call_offer(candidate, functools.partial(candidate.offer.ran, seconds))

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Reject a candidate, unless its strategy has another offer."""
        candidate.used, candidate.reason = False, reason
        if not candidate.offer.checked:
            _tell(self, candidate, "a run strategy is not used", reason=reason)
        self.decided(candidate, reason)

    def decided(self, candidate: Candidate, reason: str = "") -> None:
        """Tell an offer the result of its trial."""
        used = candidate.used is True
        self._call_offer(candidate, lambda: candidate.offer.decided(candidate.ratio, used=used, reason=reason))


class ServedRun(StrategyRun):
    """A run of a template, in the interface that strategies use.

    Attributes:
        run: the run.
        slots: numbers that this run passes to the template.
        paused: True if the session paused in the middle of the run.
        offered: True if a strategy runs the template.
        replaced: True if the strategy has replaced ops.
        compares: True if replaced ops run as well, for comparison.
        exact: True if results must be bitwise equal.
        given: storages of earlier results of the offer, by key.
        generator: the random generator of the ops, in a trial.
        difference: difference between the results of both; empty if they are equal.
        cacheable: the part of the run whose results can be cached.
        rest: runs all ops by the other strategies; None after it was called.
    """

    def __init__(
        self,
        facts: TemplateFacts,
        run: TemplateRun,
        slots: Sequence[Any],
        pause: Callable[[], Steps],
        cacheable: CacheableRun | None = None,
    ) -> None:
        """`pause`: yields the device to other sessions."""
        self.facts, self.run, self.slots = facts, run, slots
        self.cacheable = cacheable
        self.rest: Callable[[], Iterator[None]] | None = None
        self.offered = self.replaced = self.paused = self.compares = False
        self.exact, self.difference = True, ""
        self.given: dict[int, StorageWeakRef] = {}
        self.generator: torch.Generator | None = None
        self._drawn: torch.Tensor | None = None
        self._pause = pause

    def advance(self, stop: int | None = None) -> Iterator[None]:
        """Run instructions, as `StrategyRun.advance` does."""
        if self.rest is not None:
            if stop is not None:
                raise ValueError("a strategy that caches results runs all ops at once: call `advance` without `stop`")
            rest, self.rest = self.rest, None
            yield from rest()
            return
        self.undo_draws()
        while not self.run.advance(stop):
            self.paused = True
            yield from self._pause()
        self.note_draws()

    def take_rest(self) -> Callable[[], Iterator[None]] | None:
        """Return `rest` and set it to None, because it may be called once."""
        rest, self.rest = self.rest, None
        return rest

    def note_draws(self) -> None:
        """Save the random state after the ops ran."""
        self._drawn = self.generator.get_state() if self.generator is not None else None

    def undo_draws(self) -> None:
        """Restore the random state that `note_draws` saved. If the strategy has drawn random numbers, record this as a difference."""
        if self.generator is not None and self._drawn is not None:
            if not torch.equal(self.generator.get_state(), self._drawn):
                self.generator.set_state(self._drawn)
                self.difference = self.difference or "the strategy draws random numbers"
            self._drawn = None

    def arguments(self, op: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of an instruction, as `StrategyRun.arguments` does."""
        step, env = self.run.template.steps[op], self.run.env
        self.run.densify(step.reads)
        if self.run.outcome.stopped_at is not None or any(isinstance(env[place], Poison) for place in step.reads):
            raise UnfitRun
        return step.given(env)

    def replace(self, stop: int, made: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Replace instructions by results of a strategy, as `StrategyRun.replace` does."""
        run = self.run
        if run.outcome.stopped_at is not None:
            raise UnfitRun
        if not run.step < stop <= run.template.count:
            raise ValueError(f"cannot replace ops before op {stop}: {run.step} of {run.template.count} have run")
        steps = run.template.steps[run.step : stop]
        if run.template.random and any(_draws(step.op) for step in steps):
            raise ValueError("an op that draws random numbers cannot be replaced")
        if any(step.writes for step in steps):
            raise ValueError("an op that writes into an operand cannot be replaced")
        released = {place for step in steps for place in step.release}
        needed = {place for step in steps for _, place in step.makes} - released
        if missing := needed - made.keys():
            raise ValueError(
                f"replacing {len(steps)} ops leaves out values that are used later, at places {sorted(missing)}"
            )
        if not self.is_replaceable():
            raise UnfitRun
        if self.compares:
            operands = {memory_of(run.env[place]) for step in steps for place in step.reads}
            yield from self.advance(stop)
            values = [(run.env[place], made[place]) for place in sorted(needed)]
            self.difference = self.difference or _difference(values, operands, self.given, exact=self.exact)
        else:
            for place in needed:
                run.env[place] = made[place]
            run.outcome.rounded |= not self.exact
            self.passed(stop)
        self.replaced = True

    def digest(self, nbytes: int) -> bytes | None:
        """Return the key of the run, as `StrategyRun.digest` does."""
        return None if self.cacheable is None else self.cacheable.digest(nbytes)

    def results(self) -> RunResults | None:
        """Return the results, as `StrategyRun.results` does."""
        return None if self.cacheable is None else self.cacheable.results()

    def reuse(self, results: RunResults) -> bool:
        """Give results of an earlier run, as `StrategyRun.reuse` does."""
        return self.rest is not None and self.cacheable is not None and self.cacheable.reuse(results)

    def reuse_prefix(self, candidates: Iterable[RunResults]) -> Generator[None, None, bool]:
        """Compute only the rows that no earlier run has, as `StrategyRun.reuse_prefix` does."""
        if self.rest is None or self.cacheable is None:
            return False
        return (yield from self.cacheable.reuse_prefix(candidates, self._pause))

    @property
    def step(self) -> int:
        """Return the number of the next instruction."""
        return self.run.step

    def is_replaceable(self) -> bool:
        """Return True if the next instructions may be replaced: the submission is not cancelled, and nothing observes single instructions."""
        return self.run.replaceable and not self.run.outcome.halt.value

    def passed(self, stop: int) -> None:
        """Skip the instructions before `stop`, because their results are available."""
        run = self.run
        numbers_of(run.outcome, stop - 1, stop)  # its last op is the one that is issued
        run.pass_steps(stop, [place for step in run.template.steps[run.step : stop] for place in step.release], {})
        self.replaced = True


class Arbiter:
    """Choose run strategies for the templates of a device.

    Only the session that has the device calls the methods, except `choice`.

    Attributes:
        strategies: registered strategies that have not failed.
        caches_results: True if a strategy reuses results of earlier runs.
        joins_sessions: True if a strategy runs templates for several sessions at once.
    """

    def __init__(self, device: torch.device, timer: DeviceTimer, limits: TrialLimits | None = None) -> None:
        self._device, self._timer = device, timer
        self._limits = limits or TrialLimits()
        self.strategies: list[RunStrategy] = []
        self._made: weakref.WeakSet[Candidate] = weakref.WeakSet()
        self._choices: LruCache[bytes, TemplateChoice] = LruCache(TEMPLATES)
        self._lock = threading.Lock()
        self.caches_results = self.joins_sessions = False

    def register(self, strategy: RunStrategy) -> None:
        """Ask a strategy for an offer for each template from now on, after earlier strategies."""
        self.strategies.append(strategy)
        self.caches_results |= strategy.caches_results
        self.joins_sessions |= strategy.joins_sessions

    def free(self, *, dead: bool = False) -> None:
        """Let all strategies free device memory, as `RunStrategy.free` does."""
        for strategy in self.strategies:
            self.tell(strategy, functools.partial(strategy.free, dead=dead))

    def figures(self) -> dict[str, float]:
        """Return the metrics of all strategies."""
        each = [self.tell(strategy, functools.partial(_figures, strategy)) for strategy in self.strategies]
        return {name: value for figures in each if figures is not None for name, value in figures.items()}

    def tell(self, strategy: RunStrategy, call: Callable[[], _T]) -> _T | None:
        """Call a method of a strategy outside of a run. If it raises, return None and drop the strategy."""
        try:
            return call()
        except Exception as error:
            self._switch_off(strategy, error)
            return None

    def _switch_off(self, strategy: RunStrategy, error: Exception) -> None:
        with self._lock:
            if strategy not in self.strategies:
                return
            self.strategies = [other for other in self.strategies if other is not strategy]
            for candidate in [other for other in self._made if other.strategy is strategy]:
                candidate.failed, candidate.used = True, False
        _log.warning("a run strategy is switched off", strategy=strategy.name, error=repr(error))

    def choice(self, digest: bytes, template: CompiledTemplate) -> TemplateChoice | None:
        """Return the offers for a template, which all sessions share. Return None if there are no strategies."""
        if not self.strategies:
            return None
        with self._lock:
            choice = self._choices.use(digest)
            if choice is None:
                facts = facts_of(
                    template, digest, self._device, cacheable_ops(template) if self.caches_results else None
                )
                choice = TemplateChoice(facts, self._candidates(facts), self._timer)
                self._choices.store(digest, choice)
        return choice

    def _candidates(self, facts: ServedFacts) -> list[Candidate]:
        candidates = list[Candidate]()
        for strategy in self.strategies:
            if strategy.caches_results and facts.cacheable_ops is None:
                continue
            try:
                offer = strategy.acts_on(facts)
                if not isinstance(offer, RunOffer | None):
                    raise TypeError(f"acts_on must return a RunOffer or None, not {offer!r}")
            except Exception as error:
                _log.warning("a run strategy is not used", strategy=strategy.name, error=repr(error))
                continue
            if offer is not None:
                candidates.append(Candidate(strategy, offer))
        self._made.update(candidates)
        return candidates

    def run(self, choice: TemplateChoice, run: ServedRun, *, exact: bool) -> Iterator[None]:
        """Run a template to its last op, or reuse the results of an earlier run."""
        cacheable, cache = run.cacheable, choice.cache(exact=exact) if choice.caches else None
        if cacheable is None or cache is None:
            yield from self._compute(choice, run, exact=exact)
            return
        yield from run.advance(cacheable.ops.start)
        run.rest = functools.partial(self._compute, choice, run, exact=exact)
        if cacheable.begin():
            yield from self._try(choice, cache, run)
        rest = run.take_rest()
        if rest is not None and not cacheable.reused:
            yield from rest()
        else:
            yield from run.advance()

    def _compute(self, choice: TemplateChoice, run: ServedRun, *, exact: bool) -> Iterator[None]:
        """Run a template to its last op, by an offer or op by op."""
        run.rest = None
        if not choice.candidates:
            yield from run.advance()
            return
        timer, candidate = self._timer, choice.next(exact=exact)
        ready = candidate is not None and choice.stage(candidate) == "ready"
        if ready and not run.is_replaceable():
            candidate, ready = None, False
        tried = candidate if ready and candidate is not None and candidate.used is None else None
        begun = timer.mark()
        if tried is not None:  # exclude work of earlier programs from the figures
            timer.wait(begun)
            choice.spans.take()
            begun = timer.mark()
        checks = tried is not None and not tried.offer.checked and tried.checked < self._limits.checks
        run.compares = checks
        run.offered = candidate is not None and (tried is None or checks or len(tried.offered) < len(tried.before))
        if candidate is not None and run.offered:
            run.exact, run.given = candidate.strategy.exact, candidate.given
            run.generator = default_generator(self._device) if checks else None
            run.note_draws()
            yield from self._try(choice, candidate, run)
            run.undo_draws()
        yield from run.advance()
        ended = timer.mark()
        choice.spans.add(begun, ended)
        if tried is not None:
            timer.wait(ended)
        self.ran(choice, tried, run, choice.spans.take())

    def _try(self, choice: TemplateChoice, candidate: Candidate, run: ServedRun) -> Iterator[None]:
        steps = candidate.offer.run(run)
        try:
            while True:
                with inference_mode(True):
                    if next(steps, _ENDED) is _ENDED:
                        break
                yield
        except UnfitRun:
            pass
        except (TransportError, ProtocolError, QuotaExceeded):  # of a pause
            raise
        except Exception as error:
            if not is_out_of_memory(error):  # which others may have caused
                choice.failed(candidate, error)

    def ran(self, choice: TemplateChoice, tried: Candidate | None, run: ServedRun, seconds: float) -> None:
        """Note a run whose ops were issued.

        `tried`: the offer in trial. `seconds`: device time of runs that the device has completed.
        """
        choice.ran(seconds)
        if tried is None or tried.failed or choice.stage(tried) != "ready":
            return
        if run.offered and not tried.offer.checked:
            tried.fruitless = 0 if run.replaced else tried.fruitless + 1
        if run.difference or tried.fruitless >= self._limits.fruitless:
            choice.refuse(tried, run.difference or f"the strategy replaced nothing in {tried.fruitless} runs")
            return
        if run.compares:
            tried.checked += run.replaced
            if tried.checked >= self._limits.checks:
                tried.given = {}
            return
        if run.paused:  # other sessions have used the device meanwhile
            return
        if run.replaced:
            tried.offered.append(seconds)
        elif not run.offered:
            tried.before.append(seconds)
        ratio = self._limits.ratio(tried.before, tried.offered)
        if ratio is not None:
            self._decide(choice, tried, ratio)

    def _decide(self, choice: TemplateChoice, tried: Candidate, ratio: float) -> None:
        tried.ratio = ratio
        if ratio > self._limits.gain:
            choice.refuse(tried, f"the strategy takes {ratio:.2f} of the time")
        else:
            tried.used = True
            _tell(choice, tried, "a template runs by another strategy", time_ratio=round(ratio, 3))
            choice.decided(tried)


def _figures(strategy: RunStrategy) -> dict[str, float]:
    figures = dict(strategy.figures())
    if not all(map(math.isfinite, figures.values())):
        raise ValueError(f"metrics must be finite numbers, not {figures}")
    return figures


def _tell(choice: TemplateChoice, candidate: Candidate, event: str, **fields: object) -> None:
    _log.info(event, template=choice.name, strategy=candidate.strategy.name, **fields)


def facts_of(
    template: CompiledTemplate, digest: bytes, device: torch.device, cacheable: CacheableOps | None = None
) -> ServedFacts:
    """Return the facts about a template that strategies receive."""
    ops = [
        TemplateOp(step.op, step.reads, step.writes, tuple([place for _, place in step.makes]), step.release)
        for step in template.steps
    ]
    name = cacheable.digest if cacheable is not None else b""
    return ServedFacts(
        tuple(ops), device, template.random, name, template=template, digest=digest, cacheable_ops=cacheable
    )


@functools.cache
def _draws(op: str) -> bool:
    return op in OWN_OPERATORS or torch.Tag.nondeterministic_seeded in resolve(op).tags


def _difference(
    values: Sequence[tuple[Any, torch.Tensor]],
    operands: Container[int],
    given: dict[int, StorageWeakRef],
    *,
    exact: bool,
) -> str:
    """Describe the first difference between results of ops and of a strategy.

    `operands`: memory of the ops' operands. `given`: storages of earlier results of the strategy, to which these are added.
    """
    tolerance = 0.0 if exact else None  # None: PyTorch's defaults for the dtype
    memories, storages = set[int](), dict[int, StorageWeakRef]()
    for expected, actual in values:
        if isinstance(expected, Poison):
            continue
        if difference := layout_difference(expected, actual):
            return difference
        if actual.nbytes:
            memory, key = memory_of(actual), storage_key(actual)
            if memory_of(expected) in operands or memory_of(expected) in memories:
                return "an op returns a view, which cannot be replaced"
            if memory in operands or memory in memories or key in given:
                return "a result shares memory with another tensor, unlike the result of the ops"
            memories |= {memory, memory_of(expected)}
            storages[key] = StorageWeakRef(actual.untyped_storage())
        try:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return str(error)
    given.update(storages)
    return ""
