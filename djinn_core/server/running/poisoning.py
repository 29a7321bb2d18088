"""Poison: the replacement of values that a failed op would have made or written, and of those that share memory with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from djinn_core import torch_private
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.ir.values import storage_of
from djinn_core.server.running.template_compiler import CompiledStep, CompiledTemplate, Environment
from djinn_core.server.running.values import Poison, ValueTable
from djinn_core.server.running.work import RunRequest
from djinn_core.wire.message_base import Failure

STOPPED: Final = (
    "its program was stopped before this op (a deadline, Ctrl-C or djinn.cancel), and nothing waited for it any more"
)
_SHARING: Final = frozenset(
    {"aten::_unsafe_view"}
)  # what it returns shares memory, although its schema does not say so
NO_HANDLE: Final = -1  # looks into no storage
# Ops that may give what they write other memory.
_MOVES: Final = re.compile(r"resize|set_|out\b|_out\b")


class Sharing:
    """The values of a run and of its session by the address of their memory. Made at the first failure.

    It is an index, so that each of ten thousand failing ops does not search all values for aliases.
    """

    def __init__(self, steps: Sequence[CompiledStep], env: Environment, values: ValueTable) -> None:
        self._steps = steps
        self._env = env
        self._values = values
        self._seen = 0  # steps that are known to have run
        self._places: dict[int, dict[int, None]] = {}
        self._handles: dict[int, dict[int, None]] = {}
        self._views: dict[int, list[int]] = {}
        self._memory: dict[int, int] = {}  # by place

    def places(self, address: int, step: int) -> Sequence[int]:
        """Places in the environment of what had memory at `address` at some time; the run has come to `step`."""
        self._look(step)
        return tuple(self._places.get(address, ()))

    def handles(self, handle: int, address: int, step: int) -> list[int]:
        """Values of the session that look into the storage of `handle`, or had memory at `address` at some time."""
        self._look(step)
        return list(dict.fromkeys((*self._views.get(storage_of(handle), ()), *self._handles.get(address, ()))))

    def _look(self, step: int) -> None:
        if not self._memory:
            for place in range(len(self._env)):
                self._add(place)
            for handle, value in self._values.items():
                self._views.setdefault(storage_of(handle), []).append(handle)
                self._add_handle(handle, value)
            self._seen = step
        for one in self._steps[self._seen : step]:
            for _, place in one.makes:
                self._add(place)
            if one.writes and _MOVES.search(one.op):
                for place in one.writes:
                    self._moved(place)
        self._seen = step

    def _moved(self, place: int) -> None:
        """Note that the storage of the value at `place` has other memory than before."""
        before = self._memory.get(place, 0)
        for other in (place, *self._places.pop(before, ())):
            self._add(other)
        for handle in self._handles.pop(before, ()):
            if handle in self._values:
                self._add_handle(handle, self._values[handle])

    def _add(self, place: int) -> None:
        self._memory[place] = memory = _memory_of(self._env[place])
        if memory:
            self._places.setdefault(memory, {})[place] = None

    def _add_handle(self, handle: int, value: Any) -> None:
        if memory := _memory_of(value):
            self._handles.setdefault(memory, {})[handle] = None


def _memory_of(value: Any) -> int:
    """Address of a value's memory; where it has none yet a negative number that its views share; 0 if it has no storage."""
    tensor = _strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr() or -torch_private.storage_key(tensor)


def address_of(value: Any) -> int:
    """Address of a value's memory, also for poison; 0 if it has none."""
    tensor = _strided(value)
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()


def _strided(value: Any) -> torch.Tensor | None:
    if isinstance(value, Poison):
        value = value.memory
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def put_poison(
    template: CompiledTemplate,
    at: int,
    poison: Poison,
    work: RunRequest,
    env: Environment,
    values: ValueTable,
    sharing: Sharing,
) -> None:
    """In place of what step `at` would have made, and of what it would have written."""
    step = template.steps[at]
    for _, place in step.makes:
        env[place] = poison
    for written in step.writes:
        target = env[written]
        address = address_of(target) if isinstance(target, torch.Tensor) else 0
        _poison_memory(template, at, written, address, poison, work, env, values, sharing)
    for place in step.release:
        env[place] = None


def poison_rest(
    template: CompiledTemplate, first: int, work: RunRequest, env: Environment, values: ValueTable
) -> list[Failure]:
    """As `poison_all` for a program that was stopped before `first`. What to tell the client."""
    if first >= len(template.steps):
        return []
    failure = Failure(work.sequence, first, template.steps[first].op, "ProgramStopped", STOPPED)
    poison_all(template, first, failure, work, env, values)
    return [failure]


def poison_all(
    template: CompiledTemplate, first: int, failure: Failure, work: RunRequest, env: Environment, values: ValueTable
) -> None:
    """Poison what the steps from `first` on would have made or written: they did not run.

    A step that would have made a view leaves nothing behind, so what is written through it is found by what it looks into.
    """
    poison, addresses = Poison(failure), dict[int, int]()
    sharing = Sharing(template.steps, env, values)
    for step in template.steps[first:]:
        found = {place: addresses.get(place) or address_of(env[place]) for place in step.reads}
        if any(found.values()) and _shares(step.op):
            first_found = next(address for address in found.values() if address)
            addresses.update({place: first_found for _, place in step.makes})
        for written in step.writes:
            _poison_memory(template, first, written, found.get(written, 0), poison, work, env, values, sharing)
        for _, place in step.makes:
            env[place] = poison


def _shares(op: str) -> bool:
    """True if an op's results may alias its arguments."""
    if op in OWN_OPERATORS:
        return False
    returns = torch_private.schema_of(resolve(op)).returns
    return op in _SHARING or any(returned.alias_info is not None for returned in returns)


def _poison_memory(
    template: CompiledTemplate,
    at: int,
    written: int,
    address: int,
    poison: Poison,
    work: RunRequest,
    env: Environment,
    values: ValueTable,
    sharing: Sharing,
) -> None:
    """Poison the value at `written` and all that shares memory with it, within the run and outside.

    The steps before `at` have run.
    """
    first_input = len(template.constants) + template.slots
    for place in _poison_written(env, written, address, poison, sharing.places(address, at) if address else ()):
        if first_input <= place < first_input + template.inputs:
            handle = work.inputs[place - first_input]
            values.poison(sharing.handles(handle, address, at), storage_of(handle), address, poison.failure)


def _poison_written(env: Environment, written: int, address: int, poison: Poison, sharing: Sequence[int]) -> list[int]:
    """Poison the value at `written` and every other one of the run with memory at `address`, which may be half written.

    Returns their places, which are among those `sharing`.
    """
    places = [written, *[p for p in sharing if isinstance(env[p], torch.Tensor) and address_of(env[p]) == address]]
    for place in places:
        value = env[place]
        env[place] = value if isinstance(value, Poison) else Poison(poison.failure, value)
    return places
