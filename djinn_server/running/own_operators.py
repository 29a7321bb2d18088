"""Djinn's own ops on an executor: random state, generators and device events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from djinn_core.errors import UnsupportedOperation, install_hint
from djinn_core.hookspecs.operators import OperatorLibrary
from djinn_core.ir.operators import (
    ELAPSED_TIME,
    EXCHANGE_RANDOM_STATE,
    GENERATOR_STATE,
    GET_RANDOM_STATE,
    HAS_PASSED,
    LAYOUT_CALL,
    MANUAL_SEED,
    MARK,
    RESTORED_GENERATOR,
    SEEDED_GENERATOR,
    SET_RANDOM_STATE,
)
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.random_state import DeviceRandomness, set_state
from djinn_server.running.uninitialized_memory import call_with_zero_fill

T = TypeVar("T")
R = TypeVar("R")
OwnOperators = Mapping[str, Callable[..., Any]]


def own_operators(
    runtime: DeviceRuntime, timer: DeviceTimer, randomness: DeviceRandomness, libraries: Sequence[OperatorLibrary] = ()
) -> OwnOperators:
    """Return the functions of Djinn's own ops by name.

    Args:
        runtime: makes random generators on the device.
        timer: the device's clock.
        randomness: the device's random state.
        libraries: implementations of plugins. Without one for `LAYOUT_CALL`, this op raises UnsupportedOperation.
    """
    marks = _DeviceEvents(timer)
    return {
        MANUAL_SEED: randomness.manual_seed,
        GET_RANDOM_STATE: randomness.get_state,
        SET_RANDOM_STATE: _type_checked(torch.Tensor, randomness.set_state),
        EXCHANGE_RANDOM_STATE: _type_checked(torch.Generator, randomness.exchange),
        SEEDED_GENERATOR: lambda seed: runtime.generator().manual_seed(seed),
        RESTORED_GENERATOR: _type_checked(torch.Tensor, lambda state: _generator_from(runtime.generator(), state)),
        GENERATOR_STATE: _type_checked(torch.Generator, torch.Generator.get_state),
        MARK: marks.mark,
        HAS_PASSED: marks.has_passed,
        ELAPSED_TIME: marks.elapsed_time,
        LAYOUT_CALL: partial(call_with_zero_fill, _implementation(LAYOUT_CALL, libraries)),
    }


def _implementation(op: str, libraries: Sequence[OperatorLibrary]) -> Callable[..., Any]:
    implementations = (library.implementation(op) for library in libraries)
    return next((function for function in implementations if function is not None), _call_without_plugin)


def _call_without_plugin(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnsupportedOperation(
        "sparse, quantized and nested tensors need a plugin that this server lacks. On the server, run "
        + install_hint("plugins/layouts")
    )


def _generator_from(generator: torch.Generator, state: torch.Tensor) -> torch.Generator:
    set_state(generator, state)
    return generator


def _type_checked(kind: type[T], function: Callable[[T], R]) -> Callable[[Any], R]:
    """Return `function` with a check that its argument, which a client sent, is a `kind`. Otherwise it raises TypeError."""

    def checked(value: Any) -> R:
        if not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, not {type(value).__name__}")
        return function(value)

    return checked


class _DeviceEvents:
    """Timing events of clients, as moments of the device's clock."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer

    def mark(self) -> Any:
        """Return the moment after the ops issued so far."""
        return self._timer.mark()

    def has_passed(self, moment: Any) -> torch.Tensor:
        """Return a bool tensor: True if the device has reached the moment."""
        return torch.tensor(self._timer.is_reached(moment))

    def elapsed_time(self, start: Any, end: Any) -> torch.Tensor:
        """Wait for both moments, and return the milliseconds between them as a float64 tensor."""
        self._timer.wait(end)
        return torch.tensor(self._timer.seconds(start, end) * 1e3, dtype=torch.float64)
