"""Replace the instructions of a region by compiled code.

`CompiledRegion.check_guard` decides before each run whether the compiled code applies. `comparison.difference` verifies
the code: it runs instructions and compiled code on copies, and compares all results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from djinn_core.ir.operators import OWN_OPERATORS
from djinn_server.hookspecs.compilers import Replay
from djinn_server.running.compiled_step import Environment
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.uninitialized_memory import call_with_zero_fill, needs_zero_fill
from djinn_strategies.compiling.region import Region
from djinn_strategies.compiling.sizes import SizeRelation
from djinn_strategies.compiling.written_views import WrittenView, address_of, are_followed


class CompiledRegion:
    """A region with its compiled function.

    Attributes:
        growing_inputs: indices of inputs that may have spare memory for appends.
        growing_results: places of results of the last run that have spare memory.
        copied: number of results with spare memory that were copied to dense tensors for readers outside the region.
        may_round_differently: True if a later run may round differently than the run that was checked.
    """

    growing_inputs: frozenset[int] = frozenset()
    growing_results: frozenset[int] = frozenset()
    copied = 0
    may_round_differently = False

    def __init__(
        self,
        compiler: str,
        replay: Replay,
        template: CompiledTemplate,
        region: Region,
        relation: SizeRelation,
        receive: Callable[[torch.Tensor], torch.Tensor],
        aliases: Sequence[WrittenView] = (),
    ) -> None:
        """Prepare the compiled function `replay`. `receive` uploads data, as `DeviceRuntime.receive` does."""
        self.compiler, self._receive, self._aliases = compiler, receive, aliases
        self.region, self.relation = region, relation
        self.steps = template.steps[region.start : region.stop]
        if any(step.op not in OWN_OPERATORS and needs_zero_fill(step.op) for step in self.steps):
            replay = partial(call_with_zero_fill, replay)
        self._replay = replay
        self._inputs = inputs_getter(region)
        self._slots = slots_of(template)
        self._views = [template.steps[index].store for index in region.views]
        self._floats = [self._slots.start + slot for slot in relation.float_slots]
        self._guard = relation.guard()

    @property
    def may_have_overwritten(self) -> bool:
        """True if a run may have overwritten an input that the region consumes."""
        return False

    def copy_overwritten_inputs(self, env: Environment) -> None:
        """Copy the inputs in `env` that `run` would overwrite, because the instructions run afterwards and read them."""

    def check_guard(self, env: Environment) -> int | None:
        """Return the varying size `n` of a run, or 0 if all sizes are fixed.

        Return None if the region was not compiled for the sizes, numbers or aliases of this run.
        """
        tensors = self._inputs(env)
        n = self._guard.check(tensors, env[self._slots])
        return None if n is None or (self.region.written_inputs and self._has_other_aliases(env, tensors)) else n

    def run(self, env: Environment) -> None:
        """Run the compiled code on `env`, and store the results in `env`."""
        inputs = self._inputs(env)
        if self._floats:
            numbers = [env[place] for place in self._floats]
            floats = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
            inputs = (*inputs, self._receive(floats).view(torch.float64))
        results = self._replay(inputs)
        for place, tensor in zip(self.region.owned_results, results, strict=True):
            env[place] = tensor
        for view in self._views:
            view(env)

    def _has_other_aliases(self, env: Environment, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if an input aliases written memory, unless the code was compiled for this alias."""
        known_views = {alias.view for alias in self._aliases}
        addresses = [address_of(tensor) for index, tensor in enumerate(tensors) if index not in known_views]
        if any(addresses.count(address_of(env[place])) > 1 for place in self.region.written_inputs):
            return True
        return not are_followed(self._aliases, tensors)


def inputs_getter(region: Region) -> Any:
    """Return a function from an environment to the tuple of a region's inputs."""
    if len(region.inputs) > 1:
        return itemgetter(*region.inputs)
    return lambda env: tuple([env[place] for place in region.inputs])


def slots_of(template: CompiledTemplate) -> slice:
    """Return the slice of an environment that holds the template's slots, which are its numeric arguments."""
    first = len(template.constants)
    return slice(first, first + template.slots)
