"""Random state of each session, although PyTorch has one default generator per device and process."""

from __future__ import annotations

import struct
from typing import Final

import torch

# Initial seed of PyTorch's generators that were not seeded.
DEFAULT_SEED = 67280421310721
_WORDS: Final = 624  # of a Mersenne twister
_COUNTERS: Final = struct.Struct("<8xi4xQ")  # in its state: how many words are left, and which one follows


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ops on `device` use by default."""
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device.type).default_generators
    return generators[device.index or 0]


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of a generator. An untrusted client may have forged `state`.

    PyTorch checks the two counters of a Mersenne twister separately. Together, they could make the generator read beyond
    its words and return that memory as random numbers.

    Raises:
        RuntimeError: `state` is not a valid state.
    """
    state = state.cpu()
    if generator.device.type == "cpu" and state.dtype == torch.uint8 and state.numel() >= _COUNTERS.size:
        words_left, following = _COUNTERS.unpack(bytes(state.flatten()[: _COUNTERS.size].tolist()))
        if words_left + following > _WORDS + 1:
            raise RuntimeError("Invalid mt19937 state: its counters point beyond its last word")
    generator.set_state(state)


def octets_of(state: torch.Tensor) -> bytes:
    """Convert a random state to bytes."""
    return bytes(state.cpu().numpy())


def tensor_of(octets: bytes) -> torch.Tensor:
    """Convert bytes to a random state."""
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8)


class DeviceRandomness:
    """The default generator of a device. It holds the state of one session at a time."""

    def __init__(self, device: torch.device, *, borrowed: bool = False) -> None:
        """`borrowed`: True if the program in this process draws from the generator, too. Sessions then have it during their runs only."""
        self._generator = default_generator(device)
        self._holder: SessionRandomness | None = None
        self._borrowed = borrowed
        self._programs_state: torch.Tensor | None = None

    def hand_to(self, session: SessionRandomness) -> None:
        """Load a session's random state into the generator. Only the session that has the device calls this."""
        if self._holder is session:
            return
        if self._holder is not None:
            self._holder.state = self._generator.get_state()
        elif self._borrowed:
            self._programs_state = self._generator.get_state()
        self._generator.set_state(session.state)
        self._holder = session

    def give_back(self) -> None:
        """Restore the state of the program if the generator is borrowed."""
        if self._programs_state is not None and self._holder is not None:
            self._holder.state = self._generator.get_state()
            self._generator.set_state(self._programs_state)
            self._holder = None

    def state_of(self, session: SessionRandomness) -> torch.Tensor:
        """Return the random state of a session as a tensor of bytes."""
        return self._generator.get_state() if self._holder is session else session.state

    def restore(self, session: SessionRandomness, state: torch.Tensor) -> None:
        """Set the random state of a session. Only the session that has the device calls this."""
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
        """Set the state of the generator."""
        set_state(self._generator, state)

    def exchange(self, other: torch.Generator) -> None:
        """Swap states with the generator `other`."""
        before = self._generator.get_state()
        self._generator.set_state(other.get_state())
        other.set_state(before)


class SessionRandomness:
    """Saved random state of a session, while the generator holds the state of another session."""

    def __init__(self, device: torch.device) -> None:
        self.state = torch.Generator(device=device).manual_seed(DEFAULT_SEED).get_state()
