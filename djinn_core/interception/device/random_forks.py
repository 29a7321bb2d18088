"""Random state that PyTorch itself saves and restores: it stays on the executor, so that saving it costs no round trip.

`torch.random.fork_rng` and activation checkpointing ask the device module for the state and give it back later, without
reading it in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.runtime_interface import port
from djinn_core.torch_private import wrap_device_states, wrap_fork_rng


@contextmanager
def _kept_there() -> Iterator[None]:
    thread = device_state.thread
    before, thread.keeps_random_state = thread.keeps_random_state, True
    try:
        yield
    finally:
        thread.keeps_random_state = before


def _states_kept_there(get_states: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_states)
    def get_device_states(*args: Any) -> Any:
        with _kept_there():
            return get_states(*args)

    return get_device_states


def _fork_kept_there(fork: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fork)
    @contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        if port.forked and not args and kwargs.get("devices") is None:
            kwargs["devices"] = ()  # the device's state is the parent's
        forked = fork(*args, **kwargs)
        with _kept_there():
            forked.__enter__()
        try:
            yield
        finally:
            forked.__exit__(None, None, None)  # it gives the states back, whatever happened

    return fork_rng


def install() -> None:
    """Have PyTorch's own keeping of states done there."""
    wrap_fork_rng(_fork_kept_there)
    wrap_device_states(_states_kept_there)
