"""`torch.Generator(device="remote_accelerator")`: a generator whose state is a value on the executor."""

from __future__ import annotations

import threading
from typing import Any, Self

import torch

from djinn_core.interception.device import random_state
from djinn_core.interception.device.current_device import existing_index
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.runtime_interface import port
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device
from djinn_core.interception.tensors.substitute_classes import stand_in
from djinn_core.torch_private import CGenerator, generator_key, move_generator

_PHILOX_BYTES = 16  # the state of generators that count: a seed and an offset


class RemoteGenerator(CGenerator):
    """A generator for ops on a remote device.

    To PyTorch it is a CPU generator that reports another device; ops draw from its state, a value on the executor. That
    value is made at first use, so that a generator may be older than the session.
    """

    def __new__(cls, device: torch.device) -> Self:  # noqa: D102
        made = CGenerator.__new__(cls)
        move_generator(made, device)
        device_state.generators[generator_key(made)] = made
        return made

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._origin: int | torch.Tensor = CGenerator.initial_seed(self)
        self._value: LazyTensor | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The logical device."""
        return self._device

    def operand(self) -> LazyTensor | None:
        """The value that holds its state; it is the program's business from now on."""
        return self._present()

    def _present(self) -> LazyTensor:
        with self._lock:
            if self._value is None:
                seeded = isinstance(self._origin, int)
                make: Any = random_state.seeded_generator if seeded else random_state.restored_generator
                self._value = make(self._origin, self._device.index)
            return self._value

    def _restart(self, origin: int | torch.Tensor) -> None:
        with self._lock:
            self._origin, self._value = origin, None

    def manual_seed(self, seed: int) -> RemoteGenerator:
        """Start from `seed`."""
        super().manual_seed(seed)
        self._restart(super().initial_seed())
        return self

    def seed(self) -> int:
        """Start from a random seed; the seed."""
        seed: int = super().seed()
        self.manual_seed(seed)
        return seed

    def get_state(self) -> torch.Tensor:
        """The state as a CPU tensor of bytes; one round trip."""
        return random_state.generator_state(self._present())

    def set_state(self, new_state: torch.Tensor) -> RemoteGenerator:
        """Go on from `new_state`, a CPU tensor of bytes that `get_state` returned."""
        note_state(self, new_state)
        self._restart(new_state.clone())
        return self

    def clone_state(self) -> RemoteGenerator:
        """A generator of its own that goes on from the present state of this one; no round trip."""
        made = RemoteGenerator(self.device)
        CGenerator.manual_seed(made, self.initial_seed())
        made._origin, made._value = self._origin, random_state.copied_generator(self._present())
        return made

    def get_offset(self) -> int:
        """Offset of the counter, where the executor's generators are counter-based; one round trip."""
        return int(_counting(self.get_state()).view(torch.int64)[1])

    def set_offset(self, offset: int) -> RemoteGenerator:
        """Go on from `offset`, where the executor's generators count; one round trip."""
        state = _counting(self.get_state()).clone()
        state.view(torch.int64)[1] = offset
        return self.set_state(state)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self.device), self.initial_seed(), self.get_state())


class DefaultGenerator(RemoteGenerator):
    """The default generator: the random state that ops use when they are given none."""

    def operand(self) -> None:
        """None: that state is no value of the program."""

    def manual_seed(self, seed: int) -> DefaultGenerator:
        """Start from `seed`."""
        CGenerator.manual_seed(self, seed)
        random_state.manual_seed(self.initial_seed())
        return self

    def get_state(self) -> torch.Tensor:
        """The state as a CPU tensor of bytes; one round trip."""
        return random_state.get_state()

    def set_state(self, new_state: torch.Tensor) -> DefaultGenerator:
        """Go on from `new_state`, a CPU tensor of bytes that `get_state` returned."""
        note_state(self, new_state)
        random_state.set_state(new_state)
        return self

    def clone_state(self) -> RemoteGenerator:
        """A generator of its own that goes on from the present state; one round trip."""
        return RemoteGenerator(self.device).set_state(self.get_state())


class BoundDefaultGenerator(RemoteGenerator):
    """The default generator of an index that is bound to one device.

    That state is a value, as those of other generators are: ops of such an index draw with it in the place of the state
    that the executor's session has. It starts again with each session.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sessions = port.sessions_ended

    def _present(self) -> LazyTensor:
        if self._sessions != port.sessions_ended:
            self._sessions = port.sessions_ended
            self._restart(CGenerator.initial_seed(self))
        return super()._present()

    def keep_state(self) -> LazyTensor:
        """Record a copy of the state that stays on the executor."""
        return random_state.keep_generator_state(self._present())

    def go_on_from(self, state: LazyTensor) -> None:
        """Go on from a kept state."""
        with self._lock:
            self._value = random_state.restored_generator(state, self._device.index)


def note_state(generator: CGenerator, state: Any) -> None:
    """Give the CPU generator behind a remote one the seed in `state`, for `initial_seed`.

    Raises:
        TypeError: `state` is not a CPU tensor of bytes.
        RuntimeError: it is not the state of a generator.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.device.type != "cpu":
        raise TypeError("expected a torch.ByteTensor on the CPU, as get_state() returns it")
    if state.nbytes == _PHILOX_BYTES:
        CGenerator.manual_seed(generator, int(state.view(torch.int64)[0]))
    else:
        CGenerator.set_state(generator, state)


def _counting(state: torch.Tensor) -> torch.Tensor:
    if state.nbytes != _PHILOX_BYTES:
        raise RuntimeError("the executor's generators have no offset: those of the CPU do not count")
    return state


def _rebuild(kind: type[RemoteGenerator], device: str, seed: int, state: torch.Tensor) -> RemoteGenerator:
    made = kind(torch.device(device))
    made.set_state(state)
    CGenerator.manual_seed(made, seed)
    return made


def _make(device: Any = None) -> RemoteGenerator | None:
    wanted = torch.device("cpu" if device is None else device)
    return RemoteGenerator(logical_device(existing_index(wanted))) if is_remote(wanted) else None


# What becomes `torch.Generator`.
Generator = stand_in(CGenerator, _make)
