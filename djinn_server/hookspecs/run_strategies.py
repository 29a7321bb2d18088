"""`djinn_register_run_strategies`: run a template on an executor in another way than op by op."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from djinn_core.hookspecs import hookspec
from djinn_server.hookspecs.compilers import Compiler

Stage = Literal["idle", "watching", "ready"]


@attrs.frozen
class TemplateOp:
    """One op of a template. Values are named by places, which are numbers.

    Attributes:
        name: name of the overload, such as `aten::mul.Tensor`.
        reads: places of its tensor operands. writes: those of them that it writes into.
        makes: places of its new values.
        releases: places that no later op reads and the template does not return.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[int, ...]
    releases: tuple[int, ...]


@attrs.frozen
class TemplateFacts:
    """A template that sessions of an executor run.

    Attributes:
        ops: in the order in which they run.
        device: the device that it runs on.
        random: True if any op draws random numbers.
        cacheable: digest of the ops whose results can be given again to later runs, if there are such ops; empty for a strategy that does not
            cache results. Templates that differ in other ops have the same digest.
    """

    ops: tuple[TemplateOp, ...]
    device: torch.device
    random: bool = False
    cacheable: bytes = b""


class RunResults(ABC):
    """Results of a run, which the executor can give again. It copies their memory before a session writes into it.

    Attributes:
        nbytes: bytes of memory that they take.
    """

    nbytes: int

    @property
    @abstractmethod
    def held(self) -> bool:
        """True until they are dropped. The executor drops all results if it needs the memory."""

    @abstractmethod
    def drop(self) -> None:
        """Free them."""


class StrategyRun(ABC):
    """One run of a template. The executor implements it.

    Attributes:
        facts: the template.
    """

    facts: TemplateFacts

    @abstractmethod
    def advance(self, stop: int | None = None) -> Iterator[None]:
        """Run the ops before op `stop` as recorded, None: all. Write `yield from run.advance(stop)`: it may pause the session."""

    @abstractmethod
    def arguments(self, op: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the positional and the named arguments of op number `op`, whose operands must exist.

        The offer may not write into them: nothing detects it. If an operand failed to be computed, or the submission was cancelled, the call ends
        the offer's part in this run. The remaining ops run as recorded.
        """

    @abstractmethod
    def replace(self, stop: int, made: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Set the values that the ops before op `stop` compute, and skip these ops.

        Write `yield from`, as for `advance`. The skipped ops may not write into operands or draw random numbers. `made` has each
        of their values that a later op uses: in new memory in each run, with the layout that the op produces. In a trial the ops
        run as well, and the executor compares the results.

        Raises:
            ValueError: an op writes into an operand or draws random numbers, a value is missing, or the ops have run.
        """

    # For strategies with `caches_results`. Such a strategy calls `advance` without `stop`, and neither `arguments` nor `replace`.

    def digest(self, nbytes: int) -> bytes | None:
        """Return a digest of everything that decides the results of the cacheable ops; None if they draw random numbers or an operand failed.

        It covers the ops, their numbers, the session's numeric settings, and layout and contents of the operands. At most `nbytes` bytes of
        operands are read. An operand that is not read equals itself, until a program writes into it. Digests of bytes that were uploaded or read
        from a weight store are known. So are those of results that `results` has returned or `reuse` has given.
        """
        return None

    def results(self) -> RunResults | None:
        """Return the results of the cacheable ops, after `advance` and `digest`; None if an op failed or was cancelled."""
        return None

    def reuse(self, results: RunResults) -> bool:
        """Give results of a run with the same digest instead of running the cacheable ops. Call it before `advance`.

        Returns False if the results are dropped, or if the client asks for a layout that the run which made them has not checked.
        """
        return False

    def reuse_prefix(self, candidates: Iterable[RunResults]) -> Generator[None, None, bool]:
        """Compute only the tokens that no run before has had. Call it after `digest` and before `advance`: `yield from run.reuse_prefix(...)`.

        `candidates`: results of runs with the same `TemplateFacts.cacheable`. The executor takes those of the run that shares the most first
        tokens with this one, and proves that they do not depend on later tokens. Results may round in another way than those of the ops.

        Returns False, and leaves the ops to be run, if the session has `exact=True`, or if the proof fails.
        """
        del candidates
        yield from ()
        return False


class JointRun(ABC):
    """A run that another session may do with its own, while the session of this run waits for its turn on the device."""

    @abstractmethod
    def run(self) -> Generator[None, None, Any]:
        """Run the ops with those of other sessions, and return the outcome. Return None if the session has to run them alone."""

    @abstractmethod
    def ended(self, seconds: float) -> float | None:
        """Receive the device seconds of the session's turn. Return the time at which a joint run began; None if the session ran alone."""


@attrs.frozen
class Replacement:
    """Ops that an offer replaces as a whole in every run.

    Attributes:
        start, stop: the first op, and the op after the last one.
        apply: puts their results into the values of a run, which are by place. Returns False if the ops have to run.
    """

    start: int
    stop: int
    apply: Callable[[list[Any]], bool]


class RunOffer(ABC):
    """A strategy's way to run one template. The executor keeps it for all sessions of the device and calls it in one thread at a time.

    Attributes:
        checked: True if the offer compares its results with those of the ops itself, before its stage is `ready`.
        concurrent: True if it replaces ops one by one and ignores strides and storages of other values. Once its trial has ended, several
            threads may call `run` at the same time.
    """

    checked: bool = False
    concurrent: bool = False

    @abstractmethod
    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the template: a generator over `run.advance` and `run.replace`. The executor runs the ops that it leaves.

        If it raises, the executor runs the remaining ops as recorded and uses the strategy no more for this template. If it runs out of memory,
        the next run may be its again.
        """

    def stage(self) -> Stage:
        """Return `ready` if the offer can be tried and used, `watching` if `run` only observes values, else `idle`."""
        return "ready"

    def ran(self, seconds: float) -> None:  # noqa: B027 - most offers do not measure
        """Receive the device seconds of the template's runs since the last call."""

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:  # noqa: B027 - most offers have one try
        """Receive the result of a trial.

        `ratio`: its time divided by the time op by op. `used`: True if the executor uses the offer from now on. An unused offer
        is tried again after its stage has changed.
        """

    def replacement(self) -> Replacement | None:
        """Return the ops that the offer replaces now. They may run before their submission arrives, and their results may be dropped.

        None: a run of this template waits for its submission, unless the offer is `concurrent`.
        """
        return None

    def join(self, submission: Any) -> JointRun | None:
        """Return a submission (`djinn_server.running.joint_runs`) as a run that others may join; None if it cannot be joined.

        Called for strategies with `joins_sessions`, if other sessions use the device.
        """
        del submission
        return None


@attrs.frozen
class StrategyContext:
    """What an executor tells its strategies when it starts.

    Attributes:
        device: the executor's `djinn_server.shared_device.SharedDevice`. Its attributes may change in any version.
        compilers: the compilers that the operator chose, in the order in which they are asked.
    """

    device: Any
    compilers: tuple[Compiler, ...] = ()


class RunStrategy(ABC):
    """Run templates in another way than op by op.

    The executor compares the results of an offer with those of the ops, and times both. It uses the offer that takes the least device time, if
    that is less than op by op. Runs in which the executor must see each op run op by op: a profile, a replayed journal, a binding memory limit.

    Attributes:
        name: unique among run strategies.
        exact: False if results may round in another way than the ops. Such an offer runs only for sessions with `exact=False`.
        caches_results: True if its offers give results of earlier runs again. Such an offer comes before other strategies, which run what it
            leaves. The executor neither compares nor times it.
        joins_sessions: True if its offers run a template for several sessions at once (`RunOffer.join`). Such an offer comes before all others,
            and compares and times its own results. On its device no value is evicted and no submission runs beside another one.
        on_request: True if the strategy is used only if an option of the executor asks for it.
    """

    name: str
    exact: bool = True
    caches_results: bool = False
    joins_sessions: bool = False
    on_request: bool = False

    def begin(self, context: StrategyContext) -> bool:
        """Prepare when the executor starts. Return False if the strategy does nothing on this device.

        Raises:
            StartupError: it was asked for, and cannot be used with another option of the executor.
        """
        del context
        return True

    @abstractmethod
    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer for a template, or None. Depends on the argument only."""

    def before_write(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - most strategies copy nothing
        """Drop what was derived from tensors, because ops are about to write into them."""

    def free(self, *, dead: bool = False) -> None:  # noqa: B027 - most strategies hold no memory
        """Free device memory. `dead`: a session has ended, so free only what belonged to its values."""

    def figures(self) -> Mapping[str, float]:
        """Return metrics of the strategy, under their names in `/metrics`."""
        return {}


@hookspec
def djinn_register_run_strategies(settings: Any) -> Iterable[RunStrategy]:
    """Return the run strategies that this plugin offers.

    Called once in each executor process. The executor asks each strategy once for each template of its device. If `acts_on` raises, the
    template does without the strategy. If another method raises, all templates do.
    """
    del settings
    raise NotImplementedError
