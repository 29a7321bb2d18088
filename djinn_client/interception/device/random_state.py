"""Random state lives on the executor; seeding it is an instruction like any other, so program order holds.

The state that ops use by default is the session's. That of a `torch.Generator` is a value with a handle of its own, which
the random ops that are given the generator read and write.
"""

from __future__ import annotations

import torch

from djinn_client.interception.ops.own_calls import own_call
from djinn_client.interception.recording.append import append
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.upload import upload_copy
from djinn_core.ir.operators import (
    GENERATOR_STATE,
    GET_RANDOM_STATE,
    MANUAL_SEED,
    RESTORED_GENERATOR,
    SEEDED_GENERATOR,
    SET_RANDOM_STATE,
)

_SEED = own_call(MANUAL_SEED, (), 1, makes=False)
_GET = own_call(GET_RANDOM_STATE, ())


def manual_seed(seed: int) -> None:
    """Record that the remote random state restarts from `seed`, as `torch.manual_seed` does for every device."""
    append(_SEED, [], (_unsigned(seed),))


def get_state() -> torch.Tensor:
    """The remote random state, as a CPU tensor of bytes; one round trip."""
    return fetch(append(_GET, [], ()))


def keep_state() -> LazyTensor:
    """Record a copy of the remote random state that stays on the executor."""
    return append(_GET, [], ())  # type: ignore[no-any-return]


def set_state(state: torch.Tensor) -> None:
    """Record that the remote random state goes on from `state`, a CPU tensor of bytes or a kept state."""
    remote = state if isinstance(state, LazyTensor) else upload_copy(state, 0)
    append(own_call(SET_RANDOM_STATE, (remote.remote.meta,), makes=False), [remote], ())


def seeded_generator(seed: int, device: int) -> LazyTensor:
    """Record a new generator of a logical device that starts from `seed`; its value."""
    return append(own_call(SEEDED_GENERATOR, (), 1, device=device), [], (_unsigned(seed),))  # type: ignore[no-any-return]


def restored_generator(state: torch.Tensor, device: int) -> LazyTensor:
    """Record a new generator that goes on from `state`, a CPU tensor of bytes or a kept state; its value."""
    remote = state if isinstance(state, LazyTensor) else upload_copy(state, device)
    call = own_call(RESTORED_GENERATOR, (remote.remote.meta,), device=device)
    return append(call, [remote], ())  # type: ignore[no-any-return]


def copied_generator(generator: LazyTensor) -> LazyTensor:
    """Record a new generator that goes on from the present state of another; its value."""
    return restored_generator(keep_generator_state(generator), generator.remote.meta.device)


def keep_generator_state(generator: LazyTensor) -> LazyTensor:
    """Record a copy of the present state of a generator that stays on the executor."""
    meta = generator.remote.meta
    call = own_call(GENERATOR_STATE, (meta,), device=meta.device)
    return append(call, [generator], ())  # type: ignore[no-any-return]


def generator_state(generator: LazyTensor) -> torch.Tensor:
    """The present state of a generator, as a CPU tensor of bytes; one round trip."""
    return fetch(keep_generator_state(generator))


def _unsigned(seed: int) -> int:
    return int(seed) & 0xFFFF_FFFF_FFFF_FFFF
