"""`djinn_register_run_strategies`: add ways to run a template (recorded program) on an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch

from djinn_core.hookspecs import hookspec
from djinn_server.hookspecs.compilers import Compiler

Stage = Literal["idle", "watching", "ready"]


@attrs.frozen
class TemplateOp:
    """One op of a template (recorded program). Values have numbers, called places.

    Attributes:
        name: name of the overload, such as `aten::mul.Tensor`.
        reads: places of the tensor operands.
        writes: places of the operands that the op writes into.
        makes: places of the new values.
        releases: places that no later op reads and the template does not return.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[int, ...]
    releases: tuple[int, ...]


@attrs.frozen
class TemplateFacts:
    """A template (recorded program) that sessions of an executor run.

    Attributes:
        ops: the ops in the order in which they run.
        device: the device that it runs on.
        random: True if any op draws random numbers.
        cacheable: digest of the ops whose results later runs can reuse; empty without such ops, or if the strategy does
            not cache results. Templates that differ only in other ops have the same digest.
    """

    ops: tuple[TemplateOp, ...]
    device: torch.device
    random: bool = False
    cacheable: bytes = b""


class RunResults(ABC):
    """Results of a run that later runs can reuse. Before a session writes into them, the executor copies their memory.

    Attributes:
        nbytes: bytes of memory of the results.
    """

    nbytes: int

    @property
    @abstractmethod
    def held(self) -> bool:
        """True until the results are dropped. If the executor needs memory, it drops all results."""

    @abstractmethod
    def drop(self) -> None:
        """Free the memory of the results."""


class StrategyRun(ABC):
    """One run of a template. The executor implements it.

    Attributes:
        facts: the template.
    """

    facts: TemplateFacts

    @abstractmethod
    def advance(self, stop: int | None = None) -> Iterator[None]:
        """Run the recorded ops before op `stop`, or all ops if `stop` is None."""

    @abstractmethod
    def arguments(self, op: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the positional and keyword arguments of op number `op`. Its operands must have been computed.

        The offer must not write into them; the executor does not detect it. If an operand failed to be computed, or the submission was cancelled, the call ends
        the offer's part in this run. The remaining ops run as recorded.
        """

    @abstractmethod
    def replace(self, stop: int, made: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Provide the values that the ops before op `stop` would compute, and skip these ops.

        Write `yield from`, as for `advance`. The skipped ops may not write into operands or draw random numbers.
        `made` has each of their values that a later op uses, in new memory and with the layout that the op produces.
        In a trial the ops run as well, and the executor compares the results.

        Raises:
            ValueError: an op writes into an operand or draws random numbers, a value is missing, or the ops have run.
        """

    # For strategies with `caches_results`. Such a strategy calls `advance` without `stop`, and neither `arguments` nor `replace`.

    def digest(self, nbytes: int) -> bytes | None:
        """Return a digest of everything that decides the results of the cacheable ops.

        The digest covers the ops, their numbers, the session's numeric settings, and layout and contents of the operands. At most
        `nbytes` bytes of operands are read. An operand that is not read counts as unchanged until a program writes into it. Some
        digests need no reading: those of uploaded bytes, stored weights, and values of `results` or `reuse`.
        Return None if the ops draw random numbers or an operand failed.
        """
        return None

    def results(self) -> RunResults | None:
        """Return the results of the cacheable ops. Return None if an op failed or was cancelled."""
        return None

    def reuse(self, results: RunResults) -> bool:
        """Use the results of an earlier run with the same digest instead of running the cacheable ops.

        Call this before `advance`. Return False if the results were dropped, or if the client requests a layout that the
        earlier run has not checked.
        """
        return False

    def reuse_prefix(self, candidates: Iterable[RunResults]) -> Generator[None, None, bool]:
        """Reuse the rows of tokens that an earlier run shares, and compute only the other rows.

        Call it after `digest` and before `advance`: `yield from run.reuse_prefix(...)`. `candidates`: results of runs with
        the same `TemplateFacts.cacheable`. The executor takes the run with the longest common prefix of tokens, and
        proves that the run's results for the prefix do not depend on later tokens. Results may be rounded differently.

        Return False, without running ops, if the session has `exact=True` or the proof fails.
        """
        del candidates
        yield from ()
        return False


class JointRun(ABC):
    """A run that another session may execute together with its own run, while this session waits for the device."""

    @abstractmethod
    def run(self) -> Generator[None, None, Any]:
        """Run the ops together with runs of other sessions. Return the outcome, or None if this session must run alone."""

    @abstractmethod
    def ended(self, seconds: float) -> float | None:
        """Record the device seconds of the turn. Return the start of the joint run; None if the session ran alone."""


@attrs.frozen
class Replacement:
    """A sequence of ops that an offer replaces in every run.

    Attributes:
        start, stop: number of the first op, and of the op after the last one.
        apply: sets the results of the ops in the values of a run, by place. Returns False if the ops must run.
    """

    start: int
    stop: int
    apply: Callable[[list[Any]], bool]


class RunOffer(ABC):
    """A strategy's way to run one template. All sessions of the device share the offer. One thread calls it at a time.

    Attributes:
        checked: True if the offer itself compares its results with those of the ops before its stage is `ready`.
        refusal: why the offer leaves the template to the ops, as a sentence without a capital. It is empty while the offer acts or watches.
            `djinn explain` shows it.
    """

    checked: bool = False
    refusal: str = ""

    @abstractmethod
    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the template by `run.advance` and `run.replace`. The executor runs the remaining ops.

        If this method raises, the executor runs the remaining ops as recorded, and does not use the strategy for this
        template again. After an out-of-memory error, it may use the strategy again.
        """

    def stage(self) -> Stage:
        """Return `ready` if the offer can be tried and used, `watching` if `run` only observes values, else `idle`."""
        return "ready"

    def ran(self, seconds: float) -> None:  # noqa: B027 - most offers do not measure
        """Receive the device seconds of the template's runs since the last call."""

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:  # noqa: B027 - most offers have one try
        """Receive the result of a trial.

        `ratio`: time of the offer divided by the time op by op. `used`: True if the executor uses the offer from now on.
        An unused offer is tried again after its stage has changed.
        """

    def replacement(self) -> Replacement | None:
        """Return the ops that the offer now replaces in every run, or None if there are none.

        The replaced ops may run before their submission arrives, and their results may be dropped. With None, a run of this
        template starts only after its submission has arrived.
        """
        return None

    def join(self, submission: Any) -> JointRun | None:
        """Return a submission as a run that other sessions may join. Return None if no session can join it.

        Called for strategies with `joins_sessions`, if other sessions use the device. `submission`: see
        `djinn_server.running.joint_runs`.
        """
        del submission
        return None


@attrs.frozen
class StrategyContext:
    """Facts about an executor that its strategies receive at startup.

    Attributes:
        device: the executor's `djinn_server.shared_device.SharedDevice`. Its attributes may change in any version.
        compilers: the compilers that the operator chose, in the order in which they are tried.
    """

    device: Any
    compilers: tuple[Compiler, ...] = ()


class RunStrategy(ABC):
    """A way to run templates (recorded programs) other than op by op.

    The executor compares the results of an offer with those of the ops, and times both. It uses the fastest offer if
    that is faster than the ops. If the executor must see each op, the template runs op by op: for a profile, a replayed
    journal or a memory limit that is reached.

    Attributes:
        name: unique among run strategies.
        exact: False if results may be rounded differently. The strategy is then used only for sessions with `exact=False`.
        caches_results: True if offers reuse results of earlier runs. They come before other strategies, which run the
            remaining ops. The executor neither compares nor times them.
        joins_sessions: True if offers run a template for several sessions at once (`RunOffer.join`). They come before all
            other offers, and compare and time their own results. On a device with such a strategy, no value is evicted,
            and no submissions run concurrently.
        on_request: True if the strategy is used only if an option of the executor requests it.
    """

    name: str
    exact: bool = True
    caches_results: bool = False
    joins_sessions: bool = False
    on_request: bool = False

    def begin(self, context: StrategyContext) -> bool:
        """Prepare when the executor starts. Return False if the strategy does nothing on this device.

        Raises:
            StartupError: an option requests the strategy, and another option of the executor excludes it.
        """
        del context
        return True

    @abstractmethod
    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer for a template, or None to offer nothing. The result may depend on the template only."""

    def free(self, *, dead: bool = False) -> None:  # noqa: B027 - most strategies hold no memory
        """Free device memory. `dead`: free only memory that belonged to values of a session that has ended."""

    def figures(self) -> Mapping[str, float]:
        """Return metrics of the strategy, under their names in `/metrics`."""
        return {}


@hookspec
def djinn_register_run_strategies(settings: Any) -> Iterable[RunStrategy]:
    """Return the run strategies that this plugin offers.

    Called once in each executor process. The executor calls `acts_on` of each strategy once for each template of its device. If `acts_on` raises, the
    strategy is not used for this template. If another method raises, the strategy is not used any more.
    """
    del settings
    raise NotImplementedError
