"""Random state of the remote device, which is on the executor.

Seeding is an instruction, so it keeps its place in program order.

The default state belongs to the session. The state of a `torch.Generator` is a value with its own handle. Random ops
that get the generator read and write that value.
"""

from __future__ import annotations

import torch

from djinn_client.interception.native.generators import operand
from djinn_client.interception.native.library import implement, ops
from djinn_client.interception.recording.append import append, own_call
from djinn_client.interception.sync import fetch
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_client.interception.tensors.upload import upload_copy
from djinn_client.torch_dispatch import CGenerator
from djinn_core.ir.operators import (
    GENERATOR_STATE,
    GET_RANDOM_STATE,
    MANUAL_SEED,
    RESTORED_GENERATOR,
    SEEDED_GENERATOR,
    SET_RANDOM_STATE,
)

_PHILOX_BYTES = 16  # size of a counter-based generator's state: seed and offset
_SEED = own_call(MANUAL_SEED, (), 1, has_result=False)
_GET = own_call(GET_RANDOM_STATE, ())


def manual_seed(seed: int) -> None:
    """Record that the remote random state restarts from `seed`. `torch.manual_seed` calls this on every device."""
    append(_SEED, [], (_unsigned(seed),))


def get_state() -> torch.Tensor:
    """Return the remote random state as a CPU tensor of bytes; one round trip."""
    return fetch(append(_GET, [], ()))


def copy_state() -> LazyTensor:
    """Record a copy of the session's random state, and return it. The copy stays on the executor."""
    return append(_GET, [], ())  # type: ignore[no-any-return]


def set_state(state: torch.Tensor) -> None:
    """Record a restore of the remote random state from `state`: a CPU tensor of bytes, or a state that `copy_state` returned."""
    remote = state if isinstance(state, LazyTensor) else upload_copy(state, 0)
    append(own_call(SET_RANDOM_STATE, (remote.remote.meta,), has_result=False), [remote], ())


def seeded_generator(seed: int, device: int) -> LazyTensor:
    """Record a new generator of a logical device, seeded with `seed`. Return its value."""
    return append(own_call(SEEDED_GENERATOR, (), 1, device=device), [], (_unsigned(seed),))  # type: ignore[no-any-return]


def restored_generator(state: torch.Tensor, device: int) -> LazyTensor:
    """Record a new generator with the state `state`, and return its value.

    `state`: a CPU tensor of bytes, or a remote copy of a state.
    """
    remote = state if isinstance(state, LazyTensor) else upload_copy(state, device)
    call = own_call(RESTORED_GENERATOR, (remote.remote.meta,), device=device)
    return append(call, [remote], ())  # type: ignore[no-any-return]


def copied_generator(generator: LazyTensor) -> LazyTensor:
    """Record a new generator with a copy of another generator's current state. Return its value."""
    return restored_generator(copy_generator_state(generator), generator.remote.meta.device)


def copy_generator_state(generator: LazyTensor) -> LazyTensor:
    """Record a copy of a generator's current state, and return it. The copy stays on the executor."""
    meta = generator.remote.meta
    call = own_call(GENERATOR_STATE, (meta,), device=meta.device)
    return append(call, [generator], ())  # type: ignore[no-any-return]


def generator_state(generator: LazyTensor) -> torch.Tensor:
    """Return the current state of a generator as a CPU tensor of bytes; one round trip."""
    return fetch(copy_generator_state(generator))


def _unsigned(seed: int) -> int:
    return int(seed) & 0xFFFF_FFFF_FFFF_FFFF


def copy_state_of(generator: torch.Generator) -> torch.Tensor:
    """Record a copy of a generator's state, and return it. The copy stays on the executor."""
    value = operand(generator)
    return copy_state() if value is None else copy_generator_state(value)


def restore_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Restore a generator's state from a state that `copy_state_of` returned."""
    if generator.device.index == 0 and operand(generator) is None:
        set_state(state)
    else:
        ops.set_generator_value(generator, restored_generator(state, generator.device.index))


def _call(what: str, index: int, seed: int, state: torch.Tensor | None) -> torch.Tensor | None:
    match what:
        case "seed":
            manual_seed(seed)
        case "get_state":
            return get_state()
        case "set_state":
            set_state(state)  # type: ignore[arg-type]
        case "make":
            if state is None:
                return seeded_generator(seed, index)
            return restored_generator(state, index)
        case "copy":
            return copied_generator(state)  # type: ignore[arg-type]
        case "read":
            return generator_state(state)  # type: ignore[arg-type]
        case "check":
            return _seed_of(state)
    return None


def _seed_of(state: torch.Tensor | None) -> torch.Tensor:
    """Return the seed in a state.

    Raises:
        TypeError: `state` is not a CPU tensor of bytes.
        RuntimeError: `state` is not the state of a generator.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.device.type != "cpu":
        raise TypeError("expected a torch.ByteTensor on the CPU, as get_state() returns it")
    if state.nbytes == _PHILOX_BYTES:
        return state.view(torch.int64)[0].clone()
    probe = CGenerator()
    probe.set_state(state)
    seed = probe.initial_seed()
    return torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed, device="cpu")


def register() -> None:
    """Register the functions that C++ calls."""
    implement(generator=_call)
