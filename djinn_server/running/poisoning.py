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
_SHARING: Final = frozenset({"aten::_unsafe_view"})  # returns a view, although its schema does not say so
NO_HANDLE: Final = -1  # a handle without a storage, to search by address only


class MemorySharing:
    """Index of the values of a run and of its session by memory address. It is made at the first failure of a run.

    Without the index, each of ten thousand failing ops would search all values for aliases. The index of the session's
    values (`ValueTable`) outlives the run.
    """

    def __init__(self, template: CompiledTemplate, work: RunRequest, env: Environment, values: ValueTable) -> None:
        self._template = template
        self._steps = template.steps
        self._work = work
        self._env = env
        self._values = values
        self._indexed_steps = 0
        self._places: dict[int, dict[int, None]] = {}
        self._addresses: dict[int, int] = {}  # address of the value's memory by place

    def places(self, address: int, step: int) -> Sequence[int]:
        """Return the places of values with memory at `address`. `step`: number of the current step of the run."""
        self.index_until(step)
        return tuple(self._places.get(address, ()))

    def handles(self, handle: int, address: int, step: int) -> list[int]:
        """Return the handles of the session's values that view the storage of `handle` or have memory at `address`.

        `step`: number of the current step of the run.
        """
        self.index_until(step)
        return self._values.sharing_memory(storage_of(handle), address)

    def on_reallocation(self, place: int) -> None:
        """Update the index for the value at `place` and values that share its memory, which may have been reallocated."""
        before = self._addresses.get(place, 0)
        for sharing in (place, *self._places.pop(before, ())):
            self._add(sharing)
        self._values.on_reallocation(before)

    def index_until(self, step: int) -> None:
        """Index the values that steps before `step` made or reallocated."""
        if not self._addresses:
            for place in range(len(self._env)):
                self._add(place)
            if any(one.moves for one in self._steps[:step]):
                self._values.forget_addresses()
            self._indexed_steps = step
        for one in self._steps[self._indexed_steps : step]:
            for _, place in one.makes:
                self._add(place)
            if one.moves:
                for place in one.writes:
                    self.on_reallocation(place)
        self._indexed_steps = step

    def _add(self, place: int) -> None:
        self._addresses[place] = memory = memory_of(self._env[place])
        if memory:
            self._places.setdefault(memory, {})[place] = None

    def poison(self, at: int, poison: Poison) -> None:
        """Replace the results and written operands of step number `at` by poison."""
        step, env = self._steps[at], self._env
        for _, place in step.makes:
            env[place] = poison
        for target_place in step.writes:
            target = env[target_place]
            address = address_of(target) if isinstance(target, torch.Tensor) else 0
            self._poison_memory(at, target_place, address, poison)
        for place in step.release:
            env[place] = None

    def poison_from(self, first: int, failure: Failure) -> None:
        """Poison results and written operands of all steps from number `first` on, which did not run.

        A view that a skipped step would have made does not exist. So a write to it poisons its base instead.
        """
        poison, addresses, env = Poison(failure), dict[int, int](), self._env
        for step in self._steps[first:]:
            operand_addresses = {place: addresses.get(place) or address_of(env[place]) for place in step.reads}
            if any(operand_addresses.values()) and _shares(step.op):
                base_address = next(address for address in operand_addresses.values() if address)
                addresses.update({place: base_address for _, place in step.makes})
            for target_place in step.writes:
                self._poison_memory(first, target_place, operand_addresses.get(target_place, 0), poison)
            for _, place in step.makes:
                env[place] = poison

    def poison_remaining(self, first: int) -> list[Failure]:
        """Poison the steps of a program that stopped before step number `first`. Return the failures for the client."""
        if first >= len(self._steps):
            return []
        device_error = self._work.stop_reason
        kind, reason = ("AcceleratorError", device_error) if device_error else ("ProgramStopped", STOPPED)
        failure = Failure(self._work.sequence, first, self._steps[first].op, kind, reason)
        self.poison_from(first, failure)
        return [failure]

    def _poison_memory(self, at: int, target_place: int, address: int, poison: Poison) -> None:
        """Poison the value at a place, and all values of the run and the session that share its memory.

        Args:
            at: number of the step that failed. The steps before it have run.
            target_place: place of the value.
            address: address of the value's memory; 0 if it has none.
            poison: holds the failure.
        """
        template = self._template
        first_input = len(template.constants) + template.slots
        sharing = self.places(address, at) if address else ()
        for place in _poison_place(self._env, target_place, address, poison, sharing):
            if first_input <= place < first_input + template.inputs:
                handle = self._work.inputs[place - first_input]
                self._values.poison(self.handles(handle, address, at), storage_of(handle), address, poison.failure)


def _shares(op: str) -> bool:
    """Return True if an op's results may alias its arguments."""
    if op in OWN_OPERATORS:
        return False
    returns = torch_private.schema_of(resolve(op)).returns
    return op in _SHARING or any(result.alias_info is not None for result in returns)


def _poison_place(
    env: Environment, target_place: int, address: int, poison: Poison, sharing: Sequence[int]
) -> list[int]:
    """Poison the value at a place, which may be half written, and the run's values with memory at `address`.

    Return the places of the poisoned values. `sharing`: places that may share the memory.
    """
    places = [target_place, *[p for p in sharing if isinstance(env[p], torch.Tensor) and address_of(env[p]) == address]]
    for place in places:
        value = env[place]
        env[place] = value if isinstance(value, Poison) else Poison(poison.failure, value)
    return places
