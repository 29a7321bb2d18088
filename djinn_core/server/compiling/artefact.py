"""A compiled region, and the check that it may replace the region's instructions in a run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from djinn_core.hookspecs.compilers import Replay
from djinn_core.server.compiling.region import Region
from djinn_core.server.compiling.sizes import SizeRelation
from djinn_core.server.running.template_compiler import CompiledTemplate, Environment


class Artefact:
    """A compiled region. `checking` verifies its results."""

    def __init__(
        self, compiler: str, replay: Replay, template: CompiledTemplate, region: Region, law: SizeRelation
    ) -> None:
        self.compiler = compiler
        self.region, self.law = region, law
        self.steps = template.steps[region.start : region.stop]
        self._replay = replay
        self._inputs = inputs_getter(region)
        self._slots = slots_of(template)
        self._views = [template.steps[index].store for index in region.views]
        self._guard = law.guard()

    def follows(self, env: Environment) -> int | None:
        """The `n` of a run that it was compiled for, 0 if sizes do not differ; None if it was not."""
        tensors = self._inputs(env)
        n = self._guard.check(tensors, env[self._slots])
        return None if n is None or (self.region.written and self._shares(env, tensors)) else n

    def run(self, env: Environment) -> None:
        """Do the region's work in `env`."""
        made = self._replay(self._inputs(env))
        for place, tensor in zip(self.region.fresh, made, strict=True):
            env[place] = tensor
        for view in self._views:
            view(env)

    def _shares(self, env: Environment, tensors: Sequence[torch.Tensor]) -> bool:
        """True if another input aliases memory that is written."""
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        return any(addresses.count(env[place].untyped_storage().data_ptr()) > 1 for place in self.region.written)


def inputs_getter(region: Region) -> Any:
    """A function that takes a region's inputs from an environment."""
    if len(region.inputs) > 1:
        return itemgetter(*region.inputs)
    return lambda env: tuple([env[place] for place in region.inputs])


def slots_of(template: CompiledTemplate) -> slice:
    """The slice of an environment that contains the slots."""
    first = len(template.constants)
    return slice(first, first + template.slots)
