"""A random state for each session. PyTorch has only one default generator for each device of a process."""

from __future__ import annotations

import struct
from typing import Final

import torch

# Initial seed of PyTorch's generators that were not seeded.
DEFAULT_SEED = 67280421310721
_WORDS: Final = 624  # words in the state of a Mersenne twister
_COUNTERS: Final = struct.Struct("<8xi4xQ")  # in the state: number of unused words, and number of the next word


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ops on `device` use by default."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device.type).default_generators
    return generators[device.index or 0]


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of a generator. The state may come from an untrusted client.

    PyTorch checks the two counters of a Mersenne twister separately. With forged counters, the generator could read memory
    beyond its words and return it as random numbers.

    Raises:
        RuntimeError: `state` is not a valid state.
    """
    state = state.cpu()
    if generator.device.type == "cpu" and state.dtype == torch.uint8 and state.numel() >= _COUNTERS.size:
        words_left, next_word = _COUNTERS.unpack(bytes(state.flatten()[: _COUNTERS.size].tolist()))
        if words_left + next_word > _WORDS + 1:
            raise RuntimeError("invalid mt19937 state: its counters point beyond its last word")
    generator.set_state(state)


def state_to_bytes(state: torch.Tensor) -> bytes:
    """Return a generator's state, a tensor of bytes, as bytes."""
    return bytes(state.cpu().numpy())


def state_from_bytes(octets: bytes) -> torch.Tensor:
    """Return bytes as a generator's state, a tensor of bytes. It is the inverse of `state_to_bytes`."""
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8)


class DeviceRandomness:
    """The default generator of a device. It holds the state of one session at a time."""

    def __init__(self, device: torch.device, *, shared_with_program: bool = False) -> None:
        """`shared_with_program`: True if the user's program runs in this process and draws from the generator, too.

        Then sessions use the generator only during their runs.
        """
        self._generator = default_generator(device)
        self._holder: SessionRandomness | None = None
        self._shared_with_program = shared_with_program
        self._programs_state: torch.Tensor | None = None

    def hand_to(self, session: SessionRandomness) -> None:
        """Load a session's random state into the generator. Only the session that has the device calls this."""
        if self._holder is session:
            return
        if self._holder is not None:
            self._holder.state = self._generator.get_state()
        elif self._shared_with_program:
            self._programs_state = self._generator.get_state()
        self._generator.set_state(session.state)
        self._holder = session

    def give_back(self) -> None:
        """Restore the program's random state after a run, if the program shares the generator."""
        if self._programs_state is not None and self._holder is not None:
            self._holder.state = self._generator.get_state()
            self._generator.set_state(self._programs_state)
            self._holder = None

    def state_of(self, session: SessionRandomness) -> torch.Tensor:
        """Return the random state of a session as a tensor of bytes."""
        return self._generator.get_state() if self._holder is session else session.state

    def restore(self, session: SessionRandomness, state: torch.Tensor) -> None:
        """Set the random state of a session to `state`. Only the session that has the device calls this."""
        self.hand_to(session)
        self.set_state(state)
        self.give_back()

    def forget(self, session: SessionRandomness) -> None:
        """Drop the random state of a session, because the session has ended."""
        if self._holder is session:
            self._holder = None

    def manual_seed(self, seed: int) -> None:
        """Reseed the generator, as `torch.manual_seed` does."""
        self._generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        """Return the state of the generator as a tensor of bytes."""
        return self._generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state of the generator, with the checks of the module's `set_state`."""
        set_state(self._generator, state)

    def exchange(self, other: torch.Generator) -> None:
        """Swap states with the generator `other`."""
        before = self._generator.get_state()
        self._generator.set_state(other.get_state())
        other.set_state(before)


class SessionRandomness:
    """Random state of a session.

    Attributes:
        state: the saved state. It is outdated while the device's generator holds the session's state.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.Generator(device=device).manual_seed(DEFAULT_SEED).get_state()
