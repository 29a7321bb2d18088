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

MAX_TEMPLATES: Final = 1024
_ENDED: Final = object()
_T = TypeVar("_T")
_log = get_logger("djinn.server")


class UnfitRun(Exception):  # noqa: N818 - ends an offer's part in a run
    """An offer cannot take part in this run of its template. Later runs try the offer again."""


@attrs.frozen
class TrialLimits:
    """Limits of a trial.

    Attributes:
        equal_runs: number of runs whose results must equal those of the ops before runs are timed.
        max_timed: number of timed runs of the offer after which the trial is decided. The ops are timed as often.
        min_timed: number of timed runs that decide the trial if each run of the offer is faster than each run op by op.
        max_ratio: an offer is used if its time, divided by the time op by op, is at most this ratio.
        max_fruitless: consecutive runs without a replacement after which an offer is not used.
    """

    equal_runs: int = 2
    max_timed: int = 8
    min_timed: int = 3
    max_ratio: float = 0.95
    max_fruitless: int = 16

    def ratio(self, op_seconds: Sequence[float], offer_seconds: Sequence[float]) -> float | None:
        """Return the ratio of the offer's time to the time op by op. Return None if more runs are needed.

        Both arguments have the device seconds of each timed run. Only the fastest run of each counts, because slow runs
        on a busy machine include preemption.
        """
        runs = len(offer_seconds)
        is_clear = runs >= self.min_timed and max(offer_seconds) < self.max_ratio * min(op_seconds)
        return min(offer_seconds) / max(min(op_seconds), 1e-9) if is_clear or runs >= self.max_timed else None


@attrs.define(eq=False)
class Candidate:
    """A strategy's offer for a template, with the measurements of its trial.

    Attributes:
        compared_runs: number of runs whose results were compared.
        result_storages: storages of the compared results, by `storage_key`.
        fruitless_runs: consecutive runs in which the offer replaced no ops.
        op_seconds: device seconds of each trial run op by op.
        offer_seconds: device seconds of each trial run by the offer.
        ratio: time of the offer divided by the time op by op; 1.0 before a trial.
        used: True if the offer is used; None while this is not decided.
        reason: why the offer is not used.
        failed: True if the offer raised an error. It is never used again.
    """

    strategy: RunStrategy
    offer: RunOffer
    compared_runs: int = 0
    result_storages: dict[int, StorageWeakRef] = attrs.field(factory=dict)
    fruitless_runs: int = 0
    op_seconds: list[float] = attrs.field(factory=list)
    offer_seconds: list[float] = attrs.field(factory=list)
    ratio: float = 1.0
    used: bool | None = None
    reason: str = ""
    failed: bool = False

    def reset(self) -> None:
        """Discard the measurements, because the offer was replaced or withdrawn."""
        self.compared_runs, self.fruitless_runs, self.used, self.ratio = 0, 0, None, 1.0
        self.result_storages, self.op_seconds, self.offer_seconds = {}, [], []


@attrs.frozen
class ServedFacts(TemplateFacts):
    """The facts about a template that strategies receive, with parts that only Djinn's own strategies use.

    Attributes:
        template: the compiled template.
        digest: digest by which clients name the template.
        cacheable_ops: the ops whose results can be cached; None without such ops, or if no strategy caches results.
    """

    template: CompiledTemplate = attrs.field(kw_only=True)
    digest: bytes = attrs.field(kw_only=True)
    cacheable_ops: CacheableOps | None = attrs.field(kw_only=True, default=None)


class TemplateChoice:
    """A template on a device, with the offers that can run it.

    Attributes:
        facts: facts about the template.
        name: first digits of the template's digest, for logs.
        candidates: offers in the order of their trials, except `caches` and `joint`.
        caches: offers that reuse results of earlier runs.
        joint: the offer that runs the template for several sessions at once; None if no strategy offers this.
        spans: device time of the template's runs.
        has_exact: True if an offer may run the template for sessions that need bitwise equal results.
    """

    def __init__(self, facts: ServedFacts, candidates: Sequence[Candidate], timer: DeviceTimer) -> None:
        self.facts, self.name = facts, facts.digest.hex()[:8]
        self.joint = next((candidate for candidate in candidates if candidate.strategy.joins_sessions), None)
        alone = [candidate for candidate in candidates if not candidate.strategy.joins_sessions]
        self.candidates = [candidate for candidate in alone if not candidate.strategy.caches_results]
        self.caches = [candidate for candidate in alone if candidate.strategy.caches_results]
        self.spans = TimedSpans(timer)
        self.has_exact = any(candidate.strategy.exact for candidate in alone)

    def cache(self, *, exact: bool) -> Candidate | None:
        """Return an offer that may reuse results of an earlier run, or None. `exact`: as in `next`."""
        usable = (
            cache for cache in self.caches if self.stage(cache) == "ready" and (cache.strategy.exact or not exact)
        )
        return next(usable, None)

    def next(self, *, exact: bool) -> Candidate | None:
        """Return the offer for the next run: an offer in trial, or else the fastest one.

        Return None if the template must run op by op. `exact`: True if the session needs bitwise equal results.
        """
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
        """Call a method of an offer outside of a run. If the method raises, return None and give up the offer."""
        try:
            return call()
        except Exception as error:
            self.give_up(candidate, error)
            return None

    def give_up(self, candidate: Candidate, error: Exception) -> None:
        """Never use a candidate again, because its offer raised `error`."""
        if not candidate.failed:
            candidate.failed = True
            self.refuse(candidate, f"the strategy raised {type(error).__name__}: {error}")

    def decisions(self) -> Iterator[TemplateDecision]:
        """Yield a decision for each strategy that is used or refused for this template."""
        ops = self.facts.template.count
        for candidate in (*self.candidates, *self.caches):
            name, reason = candidate.strategy.name, candidate.reason or candidate.offer.refusal
            if candidate.used:
                yield TemplateDecision(self.name, ops, name, f"used: it takes {candidate.ratio:.2f} of the time")
            elif reason:
                yield TemplateDecision(self.name, ops, name, f"not used: {reason}")

    def is_replaced(self) -> bool:
        """Return True if a trial has shown that an offer is faster than the ops."""
        return any(candidate.used for candidate in self.candidates)

    def add_seconds(self, seconds: float) -> None:
        """Tell the offers in `candidates` how many device seconds the template took since the last call."""
        for candidate in self.candidates:
            if not candidate.failed:
                self._call_offer(candidate, functools.partial(candidate.offer.ran, seconds))

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Do not use a candidate, and tell its offer. A later trial follows if the offer's stage changes."""
        candidate.used, candidate.reason = False, reason
        if not candidate.offer.checked:
            _log_decision(self, candidate, "a run strategy is not used", reason=reason)
        self.report_decision(candidate, reason)

    def report_decision(self, candidate: Candidate, reason: str = "") -> None:
        """Tell an offer the result of its trial. `reason`: why it is not used; empty if it is."""
        used = candidate.used is True
        self._call_offer(candidate, lambda: candidate.offer.decided(candidate.ratio, used=used, reason=reason))


class ServedRun(StrategyRun):
    """A run of a template, in the interface that strategies use.

    Attributes:
        run: the run.
        slots: numbers that this run passes to the template.
        paused: True if the session yielded the device during the run.
        by_strategy: True if a strategy, and not only the executor, runs the template.
        replaced: True if the strategy has replaced ops.
        compares: True if replaced ops run as well, for comparison.
        exact: True if the compared results must be bitwise equal.
        result_storages: storages of the offer's earlier compared results, by `storage_key`.
        generator: the random generator of the device while results are compared, else None.
        difference: first difference between the results of the ops and of the offer; empty if they are equal.
        cacheable: the part of the run whose results can be cached; None if there is no such part.
        run_uncached: runs all ops without cached results. It is None outside of a caching offer, and after the call.
    """

    def __init__(
        self,
        facts: TemplateFacts,
        run: TemplateRun,
        slots: Sequence[Any],
        pause: Callable[[], Steps],
        cacheable: CacheableRun | None = None,
    ) -> None:
        """`pause`: returns steps that yield the device to other sessions. The other parameters are attributes."""
        self.facts, self.run, self.slots = facts, run, slots
        self.cacheable = cacheable
        self.run_uncached: Callable[[], Iterator[None]] | None = None
        self.by_strategy = self.replaced = self.paused = self.compares = False
        self.exact, self.difference = True, ""
        self.result_storages: dict[int, StorageWeakRef] = {}
        self.generator: torch.Generator | None = None
        self._state_after_ops: torch.Tensor | None = None
        self._pause = pause

    def advance(self, stop: int | None = None) -> Iterator[None]:
        """Run instructions, as `StrategyRun.advance` does."""
        if self.run_uncached is not None:
            if stop is not None:
                raise ValueError("a strategy that caches results runs all ops at once: call `advance` without `stop`")
            run_uncached, self.run_uncached = self.run_uncached, None
            yield from run_uncached()
            return
        self.undo_draws()
        while not self.run.advance(stop):
            self.paused = True
            yield from self._pause()
        self.note_draws()

    def take_run_uncached(self) -> Callable[[], Iterator[None]] | None:
        """Return `run_uncached` and set it to None, because it may be called only once."""
        run_uncached, self.run_uncached = self.run_uncached, None
        return run_uncached

    def note_draws(self) -> None:
        """Save the generator's state after ops have run, if results are compared."""
        self._state_after_ops = self.generator.get_state() if self.generator is not None else None

    def undo_draws(self) -> None:
        """Restore the random state that `note_draws` saved.

        If the strategy has drawn random numbers since then, note this in `difference`, unless it has another reason.
        """
        if self.generator is not None and self._state_after_ops is not None:
            if not torch.equal(self.generator.get_state(), self._state_after_ops):
                self.generator.set_state(self._state_after_ops)
                self.difference = self.difference or "the strategy draws random numbers"
            self._state_after_ops = None

    def arguments(self, op: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of an instruction, as `StrategyRun.arguments` does."""
        step, env = self.run.template.steps[op], self.run.env
        self.run.densify(step.reads)
        if self.run.outcome.stopped_at is not None or any(isinstance(env[place], Poison) for place in step.reads):
            raise UnfitRun
        return step.arguments_from(env)

    def replace(self, stop: int, made: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Replace instructions by results of a strategy, as `StrategyRun.replace` does."""
        run = self.run
        if run.outcome.stopped_at is not None:
            raise UnfitRun
        if not run.step < stop <= run.template.count:
            raise ValueError(
                f"cannot replace ops up to op {stop} (exclusive): the template has {run.template.count} ops, "
                f"of which the first {run.step} have run"
            )
        steps = run.template.steps[run.step : stop]
        if run.template.random and any(_draws(step.op) for step in steps):
            raise ValueError(f"an op before op {stop} draws random numbers and cannot be replaced: replace fewer ops")
        if any(step.writes for step in steps):
            raise ValueError(f"an op before op {stop} writes into an operand and cannot be replaced: replace fewer ops")
        released = {place for step in steps for place in step.release}
        needed = {place for step in steps for _, place in step.makes} - released
        if missing := needed - made.keys():
            raise ValueError(
                f"`replace` lacks values that later ops or the client use, at places {sorted(missing)}: "
                "pass each result of the replaced ops that they do not release"
            )
        if not self.is_replaceable():
            raise UnfitRun
        if self.compares:
            operands = {memory_of(run.env[place]) for step in steps for place in step.reads}
            yield from self.advance(stop)
            values = [(run.env[place], made[place]) for place in sorted(needed)]
            self.difference = self.difference or _difference(values, operands, self.result_storages, exact=self.exact)
        else:
            for place in needed:
                run.env[place] = made[place]
            run.outcome.may_round_differently |= not self.exact
            self.skip_to(stop)
        self.replaced = True

    def digest(self, nbytes: int) -> bytes | None:
        """Return the run's cache key, as `StrategyRun.digest` does. `nbytes`: bytes of operands that may be read."""
        return None if self.cacheable is None else self.cacheable.digest(nbytes)

    def results(self) -> RunResults | None:
        """Return the results of the cacheable ops, as `StrategyRun.results` does."""
        return None if self.cacheable is None else self.cacheable.results()

    def reuse(self, results: RunResults) -> bool:
        """Use the results of an earlier run, as `StrategyRun.reuse` does."""
        return self.run_uncached is not None and self.cacheable is not None and self.cacheable.reuse(results)

    def reuse_prefix(self, candidates: Iterable[RunResults]) -> Generator[None, None, bool]:
        """Compute only the rows that no earlier run has, as `StrategyRun.reuse_prefix` does."""
        if self.run_uncached is None or self.cacheable is None:
            return False
        return (yield from self.cacheable.reuse_prefix(candidates, self._pause))

    @property
    def step(self) -> int:
        """Number of the next instruction."""
        return self.run.step

    def is_replaceable(self) -> bool:
        """Return True if the next instructions may be replaced.

        They may not if the submission is cancelled, or if the executor must run each instruction, as for a profile.
        """
        return self.run.is_replaceable and not self.run.outcome.halt.value

    def skip_to(self, stop: int) -> None:
        """Skip the instructions before `stop`, because their results are available."""
        run = self.run
        numbers_of(run.outcome, stop - 1, stop)  # reports the last skipped op as the issued op
        run.skip_steps(stop, [place for step in run.template.steps[run.step : stop] for place in step.release], {})
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
        self._all_candidates: weakref.WeakSet[Candidate] = weakref.WeakSet()
        self._choices: LruCache[bytes, TemplateChoice] = LruCache(MAX_TEMPLATES)
        self._lock = threading.Lock()
        self.caches_results = self.joins_sessions = False

    def register(self, strategy: RunStrategy) -> None:
        """Ask a strategy for an offer for each new template, after the strategies that were registered earlier."""
        self.strategies.append(strategy)
        self.caches_results |= strategy.caches_results
        self.joins_sessions |= strategy.joins_sessions

    def free(self, *, dead: bool = False) -> None:
        """Let all strategies free device memory, as `RunStrategy.free` does."""
        for strategy in self.strategies:
            self.call_strategy(strategy, functools.partial(strategy.free, dead=dead))

    def figures(self) -> dict[str, float]:
        """Return the metrics of all strategies."""
        each = [self.call_strategy(strategy, functools.partial(_figures, strategy)) for strategy in self.strategies]
        return {name: value for figures in each if figures is not None for name, value in figures.items()}

    def call_strategy(self, strategy: RunStrategy, call: Callable[[], _T]) -> _T | None:
        """Return the result of a strategy's method that is called outside of a run.

        If the method raises, return None and switch the strategy off.
        """
        try:
            return call()
        except Exception as error:
            self._switch_off(strategy, error)
            return None

    def _switch_off(self, strategy: RunStrategy, error: Exception) -> None:
        with self._lock:
            if strategy not in self.strategies:
                return
            self.strategies = [registered for registered in self.strategies if registered is not strategy]
            for candidate in [c for c in self._all_candidates if c.strategy is strategy]:
                candidate.failed, candidate.used = True, False
        _log.warning("a run strategy is switched off", strategy=strategy.name, error=repr(error))

    def choice(self, digest: bytes, template: CompiledTemplate) -> TemplateChoice | None:
        """Return the offers for a template and the one in use, shared by all sessions; None without strategies."""
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
                _log.warning(
                    "a run strategy failed to make an offer for a template", strategy=strategy.name, error=repr(error)
                )
                continue
            if offer is not None:
                candidates.append(Candidate(strategy, offer))
        self._all_candidates.update(candidates)
        return candidates

    def run(self, choice: TemplateChoice, run: ServedRun, *, exact: bool) -> Iterator[None]:
        """Run a template to its last op, or reuse the results of an earlier run."""
        cacheable, cache = run.cacheable, choice.cache(exact=exact) if choice.caches else None
        if cacheable is None or cache is None:
            yield from self._compute(choice, run, exact=exact)
            return
        yield from run.advance(cacheable.ops.start)
        run.run_uncached = functools.partial(self._compute, choice, run, exact=exact)
        if cacheable.begin():
            yield from self._try(choice, cache, run)
        run_uncached = run.take_run_uncached()
        if run_uncached is not None and not cacheable.reused:
            yield from run_uncached()
        else:
            yield from run.advance()

    def _compute(self, choice: TemplateChoice, run: ServedRun, *, exact: bool) -> Iterator[None]:
        """Run a template to its last op, by an offer or op by op."""
        run.run_uncached = None
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
            choice.spans.take_seconds()
            begun = timer.mark()
        checks = tried is not None and not tried.offer.checked and tried.compared_runs < self._limits.equal_runs
        run.compares = checks
        run.by_strategy = candidate is not None and (
            tried is None or checks or len(tried.offer_seconds) < len(tried.op_seconds)
        )
        if candidate is not None and run.by_strategy:
            run.exact, run.result_storages = candidate.strategy.exact, candidate.result_storages
            run.generator = default_generator(self._device) if checks else None
            run.note_draws()
            yield from self._try(choice, candidate, run)
            run.undo_draws()
        yield from run.advance()
        ended = timer.mark()
        choice.spans.add(begun, ended)
        if tried is not None:
            timer.wait(ended)
        self._note_run(choice, tried, run, choice.spans.take_seconds())

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
        except (TransportError, ProtocolError, QuotaExceeded):  # raised while the session yielded the device
            raise
        except Exception as error:
            if not is_out_of_memory(error):  # other sessions may have caused a lack of memory
                choice.give_up(candidate, error)

    def _note_run(self, choice: TemplateChoice, tried: Candidate | None, run: ServedRun, seconds: float) -> None:
        """Update the trial of an offer after the ops of a run were issued. Decide the trial if it is complete.

        `tried`: the offer in trial, or None. `seconds`: device time of the template's runs since the last call.
        """
        choice.add_seconds(seconds)
        if tried is None or tried.failed or choice.stage(tried) != "ready":
            return
        if run.by_strategy and not tried.offer.checked:
            tried.fruitless_runs = 0 if run.replaced else tried.fruitless_runs + 1
        if run.difference or tried.fruitless_runs >= self._limits.max_fruitless:
            choice.refuse(tried, run.difference or f"the strategy replaced nothing in {tried.fruitless_runs} runs")
            return
        if run.compares:
            tried.compared_runs += run.replaced
            if tried.compared_runs >= self._limits.equal_runs:
                tried.result_storages = {}
            return
        if run.paused:  # the measured time includes other sessions' turns
            return
        if run.replaced:
            tried.offer_seconds.append(seconds)
        elif not run.by_strategy:
            tried.op_seconds.append(seconds)
        ratio = self._limits.ratio(tried.op_seconds, tried.offer_seconds)
        if ratio is not None:
            self._decide(choice, tried, ratio)

    def _decide(self, choice: TemplateChoice, tried: Candidate, ratio: float) -> None:
        tried.ratio = ratio
        if ratio > self._limits.max_ratio:
            choice.refuse(tried, f"the strategy takes {ratio:.2f} times as long as the ops one by one")
        else:
            tried.used = True
            _log_decision(choice, tried, "a template runs by another strategy", time_ratio=round(ratio, 3))
            choice.report_decision(tried)


def _figures(strategy: RunStrategy) -> dict[str, float]:
    figures = dict(strategy.figures())
    if not all(map(math.isfinite, figures.values())):
        raise ValueError(f"metrics must be finite numbers, not {figures}")
    return figures


def _log_decision(choice: TemplateChoice, candidate: Candidate, event: str, **fields: object) -> None:
    _log.info(event, template=choice.name, strategy=candidate.strategy.name, **fields)


def facts_of(
    template: CompiledTemplate, digest: bytes, device: torch.device, cacheable: CacheableOps | None = None
) -> ServedFacts:
    """Return the facts about a template that strategies receive. The parameters are those of `ServedFacts`."""
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
    known_storages: dict[int, StorageWeakRef],
    *,
    exact: bool,
) -> str:
    """Return a description of the first difference between results of ops and of a strategy; empty if they are equal.

    Args:
        values: pairs of an op's result and the strategy's result.
        operands: memory addresses of the ops' operands, as `memory_of` returns them.
        known_storages: storages of earlier results of the strategy. The call adds the storages of these results.
        exact: True if the results must be bitwise equal.
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
            if memory in operands or memory in memories or key in known_storages:
                return "a result shares memory with another tensor, unlike the result of the ops"
            memories |= {memory, memory_of(expected)}
            storages[key] = StorageWeakRef(actual.untyped_storage())
        try:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return str(error)
    known_storages.update(storages)
    return ""
