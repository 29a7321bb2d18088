"""A compiled region: runs in place of the region's instructions, where a guard says that it may, and is verified against them.

`CompiledRegion.follows` is the guard, before each run. `difference` verifies: both run on copies, and all results are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import torch

from djinn_core.hookspecs.compilers import Replay
from djinn_core.server.compiling.region import Region
from djinn_core.server.compiling.sizes import SizeRelation
from djinn_core.server.compiling.written_views import WrittenView, address_of, are_followed
from djinn_core.server.running.template_compiler import CompiledTemplate, Environment


class CompiledRegion:
    """A region as a compiler made it. `difference` verifies its results."""

    def __init__(
        self,
        compiler: str,
        replay: Replay,
        template: CompiledTemplate,
        region: Region,
        law: SizeRelation,
        device: torch.device,
        aliases: Sequence[WrittenView] = (),
    ) -> None:
        self.compiler, self._device, self._aliases = compiler, device, aliases
        self.region, self.law = region, law
        self.steps = template.steps[region.start : region.stop]
        self._replay = replay
        self._inputs = inputs_getter(region)
        self._slots = slots_of(template)
        self._views = [template.steps[index].store for index in region.views]
        self._floats = [self._slots.start + slot for slot in law.floats]
        self._guard = law.guard()

    def follows(self, env: Environment) -> int | None:
        """The `n` of a run that it was compiled for, 0 if sizes do not differ; None if it was not."""
        tensors = self._inputs(env)
        n = self._guard.check(tensors, env[self._slots])
        return None if n is None or (self.region.written and self._shares(env, tensors)) else n

    def run(self, env: Environment) -> None:
        """Do the region's work in `env`."""
        inputs = self._inputs(env)
        if self._floats:
            numbers = [env[place] for place in self._floats]
            inputs = (*inputs, torch.tensor(numbers, dtype=torch.float64, device=self._device))
        made = self._replay(inputs)
        for place, tensor in zip(self.region.fresh, made, strict=True):
            env[place] = tensor
        for view in self._views:
            view(env)

    def _shares(self, env: Environment, tensors: Sequence[torch.Tensor]) -> bool:
        """True if another input aliases memory that is written, and was not compiled as such."""
        known = {alias.view for alias in self._aliases}
        addresses = [address_of(tensor) for index, tensor in enumerate(tensors) if index not in known]
        if any(addresses.count(address_of(env[place])) > 1 for place in self.region.written):
            return True
        return not are_followed(self._aliases, tensors)


def inputs_getter(region: Region) -> Any:
    """A function that takes a region's inputs from an environment."""
    if len(region.inputs) > 1:
        return itemgetter(*region.inputs)
    return lambda env: tuple([env[place] for place in region.inputs])


def slots_of(template: CompiledTemplate) -> slice:
    """The slice of an environment that contains the slots."""
    first = len(template.constants)
    return slice(first, first + template.slots)


# Larger inputs that are only read are not copied: a session would wait for it.
COPIED_BYTES: Final = 4 << 20


def difference(compiled: CompiledRegion, env: Environment) -> str:
    """Describe how a compiled region's results on `env` differ from its instructions'; empty: not at all. `env` is unchanged.

    Raises:
        Exception: any error that the instructions themselves raise.
    """
    theirs, ours = _copy(compiled, env), _copy(compiled, env)
    for step in compiled.steps:
        step.run(theirs)
    try:
        compiled.run(ours)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    region = compiled.region
    if _shares_memory(compiled, ours, env):
        return "a result shares memory that it should have for itself"
    places = [place for step in compiled.steps for _, place in step.makes if isinstance(ours[place], torch.Tensor)]
    for place in (*dict.fromkeys(places), *region.written):
        if found := _unlike(theirs[place], ours[place]):
            return found
    return ""


def _copy(compiled: CompiledRegion, env: Environment) -> Environment:
    """An environment whose inputs are copies, which share memory as those of `env` do."""
    copied = list(env)
    region = compiled.region
    storages = {
        address_of(env[place]): env[place].untyped_storage().clone()
        for place in region.inputs
        if place in region.written or env[place].nbytes <= COPIED_BYTES
    }
    for place in region.inputs:
        if (storage := storages.get(address_of(env[place]))) is not None:
            copied[place] = _twin(env[place], storage)
    return copied


def _twin(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor that looks the same in other memory."""
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _shares_memory(compiled: CompiledRegion, ours: Environment, env: Environment) -> bool:
    places = compiled.region.fresh
    inputs = {address_of(values[place]) for place in compiled.region.inputs for values in (ours, env)}
    fresh = [address_of(ours[place]) for place in places if address_of(ours[place])]
    return len(set(fresh)) < len(fresh) or not inputs.isdisjoint(fresh)


def _unlike(expected: object, found: object) -> str:
    if expected is None:  # not needed after the region
        return ""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return f"a result is a {type(found).__name__} in place of a {type(expected).__name__}"
    theirs, ours = _layout(expected), _layout(found)
    if theirs != ours:
        return f"a result is laid out as {ours} in place of {theirs}"
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )
