"""Wrappers of functions in transformers' `generate()` that add late stop checks.

`GenerationMixin._sample` creates a `DeferredStopCheck` if `is_supported` is true, and calls it after each step.
`_undo_generation_steps` then removes the surplus steps that the check reports. `_sample` runs its steps inside
`_optimize_model_for_decode`, and continues after that block if the block suppresses an error.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import TracebackType
from typing import Any, Final

import attrs

from djinn.compat import LazyTensor
from djinn.hooks import get_logger
from djinn_client.interception.async_fetch import round_trip_seconds
from djinn_client.runtime.plugins import is_disabled
from djinn_integrations.late_stop.caches import TruncatableCache
from djinn_integrations.late_stop.check import LateStopCheck
from djinn_integrations.late_stop.conditions import cache_obstacle, late_check_obstacle, max_late_length
from djinn_integrations.late_stop.pace import StepTimes

_log = get_logger("djinn.late_stop")
_KNOWN_PARAMETERS: Final = {
    "StopCheck.__call__": ("self", "unfinished_sequences", "tokens", "length"),
    "StopCheck.finish": ("self",),
    "DeferredStopCheck.__init__": ("self", "input_ids", "max_length", "cache", "cache_is_returned", "streamer"),
    "DeferredStopCheck.is_supported": ("device", "cache", "cache_is_returned", "is_assistant"),
    "_undo_generation_steps": ("num_steps", "input_ids", "recorded"),
    "GenerationMixin._optimize_model_for_decode": ("self",),
    "GenerationMixin._sample": (
        *("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config"),
        *("synced_gpus", "streamer", "model_kwargs"),
    ),
}


@attrs.define
class _Generation:
    """A running call of `_sample`.

    Attributes:
        model: the model.
        config: the generation configuration.
        late: True if its stop checks may be late.
        check: its late stop check, or None.
    """

    model: Any
    config: Any
    late: bool
    check: LateStopCheck | None = None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Generation] = []

    @property
    def innermost(self) -> _Generation | None:
        return self.stack[-1] if self.stack else None


_running = _ThreadState()


class _SamplingCalls:
    """Counter of running calls that draw from the device's random state.

    Late checks need it to be 1, because a concurrent call's draws would be undone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def __enter__(self) -> None:
        with self._lock:
            self.calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.calls -= 1


_sampling = _SamplingCalls()


def adapt(module: Any) -> None:
    """Let stop checks of remote sequences be late in `transformers.generation.utils`, if its functions are known."""
    if not _has_known_functions(module):
        _log.info("late stop checks do not support this version of transformers, so generate() waits for each token")
        return
    for path, change in _WRAPPERS.items():
        owner, _, name = path.rpartition(".")
        holder = getattr(module, owner) if owner else module
        setattr(holder, name, change(getattr(holder, name)))


def _has_known_functions(module: Any) -> bool:
    try:
        for path, parameters in _KNOWN_PARAMETERS.items():
            if tuple(inspect.signature(attrgetter(path)(module)).parameters) != parameters:
                return False
        names = inspect.unwrap(attrgetter("GenerationMixin._sample")(module)).__code__.co_names
    except AttributeError:
        return False
    return {path.rpartition(".")[2] for path in _WRAPPERS if path != "GenerationMixin._sample"} <= set(names)


def _storing_arguments(sample: Any) -> Any:
    """Return a wrapper of `_sample` that stores its arguments for the other wrappers."""
    signature = inspect.signature(sample)

    @functools.wraps(sample)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        generation = _Generation(self, arguments["generation_config"], late=False)
        remote = isinstance(arguments["input_ids"], LazyTensor)
        if remote and not is_disabled("late_stop"):
            generation.late = _can_be_late(arguments)
        with _on_stack(generation, draws=remote and generation.config.do_sample):
            return sample(self, *args, **kwargs)

    return _sample


def _can_be_late(arguments: Mapping[str, Any]) -> bool:
    reason = late_check_obstacle(
        arguments["self"],
        arguments["logits_processor"],
        arguments["stopping_criteria"],
        arguments["generation_config"],
        arguments.get("synced_gpus", False),
    )
    if reason:
        _log.debug("generate() waits for each stop check", reason=reason)
    return not reason


@contextmanager
def _on_stack(generation: _Generation, draws: bool) -> Iterator[None]:
    _running.stack.append(generation)
    try:
        if draws:
            with _sampling:
                yield
        else:
            yield
    finally:
        _running.stack.pop()


def _with_late_check(original: Any) -> Any:
    class DeferredStopCheck(original):  # type: ignore[misc]
        """Class whose constructor returns a late check if `generate()` allows one here, or else transformers' own."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            generation = _running.innermost
            if generation is None or not generation.late:
                return object.__new__(cls)
            generation.check = _make_check(generation, *args, **kwargs)
            return generation.check

        @staticmethod
        def is_supported(device: Any, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            generation = _running.innermost
            if generation is None or not generation.late:
                return bool(original.is_supported(device, cache, cache_is_returned, is_assistant))
            reason = cache_obstacle(generation.model, generation.config, cache, cache_is_returned)
            if reason:
                _log.debug("generate() waits for each stop check", reason=reason)
                generation.late = False
            return not reason

    return DeferredStopCheck


def _make_check(
    generation: _Generation,
    input_ids: Any,
    max_length: int | None,
    cache: Any,
    cache_is_returned: bool,
    streamer: Any = None,
) -> LateStopCheck:
    longest, draws = max_late_length(generation.model), generation.config.do_sample

    def may_go_on(length: int) -> bool:
        return length < longest and not (draws and _sampling.calls > 1)

    truncatable = TruncatableCache(cache) if cache is not None and cache_is_returned else None
    return LateStopCheck(input_ids, max_length, streamer, truncatable, StepTimes(round_trip_seconds()), may_go_on)


def _suppressing_surplus_errors(optimize: Any) -> Any:
    """Return a wrapper of `_optimize_model_for_decode` that suppresses errors of surplus steps."""

    @functools.wraps(optimize)
    def _optimize_model_for_decode(self: Any) -> Any:
        return _Steps(optimize(self), _running.innermost)

    return _optimize_model_for_decode


@attrs.define
class _Steps:
    """The block of `_sample` in which steps run."""

    around: Any
    generation: _Generation | None

    def __enter__(self) -> Any:
        return self.around.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.around.__exit__(kind, error, trace):
            return True
        check = self.generation.check if self.generation is not None else None
        if check is None or not isinstance(error, Exception) or not check.was_surplus():
            return False
        _log.debug("the error of a discarded step was ignored", error=repr(error))
        return True


def _undoing_surplus_steps(undo: Any) -> Any:
    @functools.wraps(undo)
    def _undo_generation_steps(num_steps: int, input_ids: Any, *recorded: Any) -> tuple[Any, ...]:
        generation = _running.innermost
        if generation is None or generation.check is None:
            return tuple(undo(num_steps, input_ids, *recorded))
        return generation.check.without_surplus(*recorded)

    return _undo_generation_steps


_WRAPPERS: Final[dict[str, Callable[[Any], Any]]] = {
    "GenerationMixin._sample": _storing_arguments,
    "GenerationMixin._optimize_model_for_decode": _suppressing_surplus_errors,
    "DeferredStopCheck": _with_late_check,
    "_undo_generation_steps": _undoing_surplus_steps,
}
