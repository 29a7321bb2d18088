"""Verification of a compiled region against its instructions: both run on copies, and all results are compared."""

from __future__ import annotations

from typing import Final

import torch

from djinn_core.server.compiling.artefact import Artefact
from djinn_core.server.running.template_compiler import Environment

# Larger inputs that are only read are not copied: a session would wait for it.
COPIED_BYTES: Final = 4 << 20


def difference(artefact: Artefact, env: Environment) -> str:
    """Describe how a compiled region's results on `env` differ from its instructions'; empty: not at all. `env` is unchanged.

    Raises:
        Exception: any error that the instructions themselves raise.
    """
    theirs, ours = _copy(artefact, env), _copy(artefact, env)
    for step in artefact.steps:
        step.run(theirs)
    try:
        artefact.run(ours)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    region = artefact.region
    if _shares_memory(artefact, ours, env):
        return "a result shares memory that it should have for itself"
    places = [place for step in artefact.steps for _, place in step.makes if isinstance(ours[place], torch.Tensor)]
    for place in (*dict.fromkeys(places), *region.written):
        if found := _unlike(theirs[place], ours[place]):
            return found
    return ""


def _copy(artefact: Artefact, env: Environment) -> Environment:
    copied = list(env)
    for place in artefact.region.inputs:
        if place in artefact.region.written or env[place].nbytes <= COPIED_BYTES:
            copied[place] = _twin(env[place])
    return copied


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own that looks the same."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _shares_memory(artefact: Artefact, ours: Environment, env: Environment) -> bool:
    places = artefact.region.fresh
    inputs = {_address(values[place]) for place in artefact.region.inputs for values in (ours, env)}
    fresh = [_address(ours[place]) for place in places if _address(ours[place])]
    return len(set(fresh)) < len(fresh) or not inputs.isdisjoint(fresh)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
