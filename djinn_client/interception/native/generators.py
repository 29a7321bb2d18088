"""Random generators of the remote device: C++ keeps their states, which are values of the executor, and Python makes these."""

from __future__ import annotations

import copyreg
from typing import Any

import torch

from djinn_client.interception.device.current_device import existing_index
from djinn_client.interception.device.device_state import DEVICE_NAME
from djinn_client.interception.native.library import implement, ops
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_client.interception.tensors.substitute_classes import stand_in
from djinn_client.torch_dispatch import CGenerator

_PHILOX_BYTES = 16  # the state of generators that count: a seed and an offset


def default(index: int) -> torch.Generator:
    """The default generator of an index."""
    found: torch.Generator = ops.default_generator(index)
    return found


def operand(generator: torch.Generator) -> LazyTensor | None:
    """The value that holds the state of a generator; None for the state that the executor's session has.

    Raises:
        RuntimeError: the generator is of another device.
    """
    found: LazyTensor | None = ops.generator_value(generator)
    return found


def keep_state(generator: torch.Generator) -> torch.Tensor:
    """Record a copy of the state that stays on the executor."""
    from djinn_client.interception.device import random_state

    value = operand(generator)
    return random_state.keep_state() if value is None else random_state.keep_generator_state(value)


def go_on_from(generator: torch.Generator, state: torch.Tensor) -> None:
    """Go on from a kept state."""
    from djinn_client.interception.device import random_state

    if generator.device.index == 0 and operand(generator) is None:
        random_state.set_state(state)
    else:
        ops.set_generator_value(generator, random_state.restored_generator(state, generator.device.index))


def _ask(what: str, index: int, seed: int, given: torch.Tensor | None) -> torch.Tensor | None:
    from djinn_client.interception.device import random_state

    match what:
        case "seed":
            random_state.manual_seed(seed)
        case "get_state":
            return random_state.get_state()
        case "set_state":
            random_state.set_state(given)  # type: ignore[arg-type]
        case "make":
            if given is None:
                return random_state.seeded_generator(seed, index)
            return random_state.restored_generator(given, index)
        case "copy":
            return random_state.copied_generator(given)  # type: ignore[arg-type]
        case "read":
            return random_state.generator_state(given)  # type: ignore[arg-type]
        case "check":
            return _seed_of(given)
    return None


def _seed_of(state: torch.Tensor | None) -> torch.Tensor:
    """The seed in a state.

    Raises:
        TypeError: `state` is not a CPU tensor of bytes.
        RuntimeError: it is not the state of a generator.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.device.type != "cpu":
        raise TypeError("expected a torch.ByteTensor on the CPU, as get_state() returns it")
    if state.nbytes == _PHILOX_BYTES:
        return state.view(torch.int64)[0].clone()
    probe = CGenerator()
    probe.set_state(state)
    seed = probe.initial_seed()
    return torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed, device="cpu")


def _reduce(generator: Any) -> Any:
    """As PyTorch pickles generators, but without an offset, which the executor's may not have."""
    if generator.device.type != DEVICE_NAME:
        return generator.__reduce__()
    return torch.Generator, (generator.device,), (generator.initial_seed(), None, generator.get_state())


class NativeGenerator(CGenerator):
    """A generator whose device is shown under another name."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return CGenerator.device.__get__(self)


def _make(device: Any = None) -> NativeGenerator | None:
    wanted = torch.device("cpu" if device is None else device)
    return NativeGenerator(logical_device(existing_index(wanted))) if is_remote(wanted) else None


# What becomes `torch.Generator` where the device has another name.
Generator = stand_in(CGenerator, _make)


def register() -> None:
    """Have C++ call this."""
    implement(generator=_ask)
    copyreg.pickle(CGenerator, _reduce)
