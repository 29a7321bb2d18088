"""Poison values after a failed op: its results, the operands that it writes, and all values that share memory with these.

A poisoned value has no contents. A fetch of the value raises the error of the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from djinn_core import torch_private
from djinn_core.ir.handles import storage_of
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_core.wire.message_base import Failure
from djinn_server.running.compiled_step import Environment
from djinn_server.running.run_request import RunRequest
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import Poison, ValueTable, address_of, memory_of

STOPPED: Final = "its program was stopped before this op, by a deadline, Ctrl-C or djinn.cancel"
_SHARING: Final = frozenset(
    {"aten::_unsafe_view"}
)  # what it returns shares memory, although its schema does not say so
NO_HANDLE: Final = -1  # looks into no storage


class MemorySharing:
    """Index of the values of a run and of its session by memory address, made at the first failure.

    Without the index, each of ten thousand failing ops would search all values for aliases. The session's part is kept
    from run to run.
    """

    def __init__(self, template: CompiledTemplate, work: RunRequest, env: Environment, values: ValueTable) -> None:
        self._template = template
        self._steps = template.steps
        self._work = work
        self._env = env
        self._values = values
        self._seen = 0  # steps that are known to have run
        self._places: dict[int, dict[int, None]] = {}
        self._memory: dict[int, int] = {}  # by place

    def places(self, address: int, step: int) -> Sequence[int]:
        """Return the places of values with memory at `address`. `step`: the current step of the run."""
        self.follow(step)
        return tuple(self._places.get(address, ()))

    def handles(self, handle: int, address: int, step: int) -> list[int]:
        """Return the handles of the session's values that view the storage of `handle` or have memory at `address`."""
        self.follow(step)
        return self._values.sharing_memory(storage_of(handle), address)

    def moved(self, place: int) -> None:
        """Note that the value at `place` may have been reallocated."""
        before = self._memory.get(place, 0)
        for sharing in (place, *self._places.pop(before, ())):
            self._add(sharing)
        self._values.moved(before)

    def follow(self, step: int) -> None:
        """Index the values that steps before `step` made or reallocated."""
        if not self._memory:
            for place in range(len(self._env)):
                self._add(place)
            if any(one.moves for one in self._steps[:step]):
                self._values.forget_addresses()
            self._seen = step
        for one in self._steps[self._seen : step]:
            for _, place in one.makes:
                self._add(place)
            if one.moves:
                for place in one.writes:
                    self.moved(place)
        self._seen = step

    def _add(self, place: int) -> None:
        self._memory[place] = memory = memory_of(self._env[place])
        if memory:
            self._places.setdefault(memory, {})[place] = None

    def poison(self, at: int, poison: Poison) -> None:
        """Replace the results and written operands of step `at` by `poison`."""
        step, env = self._steps[at], self._env
        for _, place in step.makes:
            env[place] = poison
        for written in step.writes:
            target = env[written]
            address = address_of(target) if isinstance(target, torch.Tensor) else 0
            self._poison_memory(at, written, address, poison)
        for place in step.release:
            env[place] = None

    def poison_from(self, first: int, failure: Failure) -> None:
        """Poison results and written operands of all steps from `first` on, which did not run.

        A view that a skipped step would have made does not exist, so writes through it are traced to its base.
        """
        poison, addresses, env = Poison(failure), dict[int, int](), self._env
        for step in self._steps[first:]:
            operand_addresses = {place: addresses.get(place) or address_of(env[place]) for place in step.reads}
            if any(operand_addresses.values()) and _shares(step.op):
                first_found = next(address for address in operand_addresses.values() if address)
                addresses.update({place: first_found for _, place in step.makes})
            for written in step.writes:
                self._poison_memory(first, written, operand_addresses.get(written, 0), poison)
            for _, place in step.makes:
                env[place] = poison

    def poison_rest(self, first: int) -> list[Failure]:
        """Poison the steps of a program that stopped before `first`, and return the failures for the client."""
        if first >= len(self._steps):
            return []
        lost = self._work.stop_reason
        kind, reason = ("AcceleratorError", lost) if lost else ("ProgramStopped", STOPPED)
        failure = Failure(self._work.sequence, first, self._steps[first].op, kind, reason)
        self.poison_from(first, failure)
        return [failure]

    def _poison_memory(self, at: int, written: int, address: int, poison: Poison) -> None:
        """Poison the value at place `written`, and all values of the run and the session that share its memory.

        The steps before `at` have run.
        """
        template = self._template
        first_input = len(template.constants) + template.slots
        sharing = self.places(address, at) if address else ()
        for place in _poison_written(self._env, written, address, poison, sharing):
            if first_input <= place < first_input + template.inputs:
                handle = self._work.inputs[place - first_input]
                self._values.poison(self.handles(handle, address, at), storage_of(handle), address, poison.failure)


def _shares(op: str) -> bool:
    """Return True if an op's results may alias its arguments."""
    if op in OWN_OPERATORS:
        return False
    returns = torch_private.schema_of(resolve(op)).returns
    return op in _SHARING or any(returned.alias_info is not None for returned in returns)


def _poison_written(env: Environment, written: int, address: int, poison: Poison, sharing: Sequence[int]) -> list[int]:
    """Poison the value at place `written`, which may be half written, and all values of the run with memory at `address`.

    Return the places of the poisoned values. `sharing`: places that may share the memory.
    """
    places = [written, *[p for p in sharing if isinstance(env[p], torch.Tensor) and address_of(env[p]) == address]]
    for place in places:
        value = env[place]
        env[place] = value if isinstance(value, Poison) else Poison(poison.failure, value)
    return places
