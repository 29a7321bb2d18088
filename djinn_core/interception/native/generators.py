"""Random generators of the native device: states are values of the executor, which Python makes when they are used first."""

from __future__ import annotations

from typing import Any, Final

import torch

from djinn_core.interception.native.library import implement, ops
from djinn_core.interception.runtime_interface import port

_states: Final[dict[int, State]] = {}


class State:
    """State of one generator. It is made at its first use, so that a generator may be older than the session."""

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.origin: int | torch.Tensor = seed
        self.value: Any = None
        self.sessions = port.sessions_ended

    def present(self) -> Any:
        """The value that holds it."""
        from djinn_core.interception.device import random_state

        if self.value is None:
            make: Any = random_state.seeded_generator if isinstance(self.origin, int) else random_state.restored_generator
            self.value = make(self.origin, self.index)
        return self.value

    def restart(self, origin: int | torch.Tensor) -> None:
        """Go on from a seed, or from a state on the CPU."""
        self.origin, self.value = origin, None


def is_session_default(number: int) -> bool:
    """True for the generator of index 0 that ops use by default: its state is the session's."""
    return number == -1


def state_of(number: int) -> State:
    """The state of a generator that is not the session's."""
    if len(_states) > 64:
        for gone in ops.generators_gone():
            _states.pop(gone, None)
    found = _states.get(number)
    if found is None:
        index = -1 - number if number < 0 else number & 0xFF
        found = _states[number] = State(index, 67280421310721)
    elif number < 0 and found.sessions != port.sessions_ended:
        found.sessions = port.sessions_ended
        found.restart(found.origin if isinstance(found.origin, int) else 67280421310721)
    return found


def _ask(what: str, number: int, value: int, given: torch.Tensor | None) -> torch.Tensor | None:
    from djinn_core.interception.device import random_state

    default = is_session_default(number)
    if what == "operand":
        return None if default else state_of(number).present()
    if what == "seed":
        if default:
            random_state.manual_seed(value)
        else:
            state_of(number).restart(value & 0xFFFF_FFFF_FFFF_FFFF)
        return None
    if what == "get_state":
        return random_state.get_state() if default else random_state.generator_state(state_of(number).present())
    if what == "set_state":
        assert given is not None
        return _set_state(number, given)
    if what == "clone":
        copy = _states[value] = State(value & 0xFF, 0)
        copy.value = (
            random_state.restored_generator(random_state.get_state(), 0)
            if default
            else random_state.copied_generator(state_of(number).present())
        )
        return None
    return _offset(what, number, value)


def _set_state(number: int, given: torch.Tensor) -> torch.Tensor | None:
    from djinn_core.interception.device import random_state
    from djinn_core.interception.device.generators import note_state

    probe = torch._C.Generator()
    note_state(probe, given)
    if is_session_default(number):
        random_state.set_state(given)
    else:
        state_of(number).restart(given.clone())
    return torch.tensor(probe.initial_seed() - (1 << 64 if probe.initial_seed() >= 1 << 63 else 0), device="cpu")


def _offset(what: str, number: int, value: int) -> torch.Tensor | None:
    from djinn_core.interception.device.generators import _counting

    state = _counting(_ask("get_state", number, 0, None))  # type: ignore[arg-type]
    if what == "get_offset":
        return state.view(torch.int64)[1].clone()
    state = state.clone()
    state.view(torch.int64)[1] = value
    return _set_state(number, state)


def register() -> None:
    """Have C++ call this."""
    implement(generator=_ask)
