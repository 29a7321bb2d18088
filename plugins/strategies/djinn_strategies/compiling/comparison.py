"""Compare the results of a compiled region with the results of its instructions. Both run on copies.

The results may differ by rounding. Ill-conditioned computations amplify rounding: for example a sum of terms that
cancel, or a step of Adam with a gradient near zero. If a difference exceeds the default tolerances of
`torch.testing.assert_close`, the instructions run again, and each intermediate value is perturbed by some units in the
last place. The compiled results may differ by a small multiple of the change that the perturbation causes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Final

import torch

from djinn_core.ir.values import meta_of
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.result_layout import layout_difference
from djinn_strategies.compiling.compiled_region import CompiledRegion
from djinn_strategies.compiling.recorded_region import RecordedRegion, bitwise_mismatch, difference_in_place
from djinn_strategies.compiling.written_views import address_of

# Larger read-only inputs are not copied: the copy would delay the session.
COPIED_BYTES: Final = 4 << 20
_PERTURBED_RUNS: Final = 2
_PERTURBATION_ULPS: Final = 4.0  # units in the last place: the error of library functions
_TOLERATED_PERTURBATIONS: Final = 4.0


def difference(compiled: CompiledRegion, env: Environment) -> str:
    """Describe how the results of a compiled region on `env` differ from the results of its instructions.

    Return an empty text if they agree. `env` is unchanged.

    Raises:
        Exception: any error of an instruction.
    """

    @cache
    def perturbed() -> Sequence[Environment]:
        return [_perturbed(compiled, env, seed) for seed in range(_PERTURBED_RUNS)]

    def mismatch(place: int, expected: object, found: object) -> str:
        return _mismatch(expected, found, partial(_at, place, perturbed))

    if isinstance(compiled, RecordedRegion):
        return difference_in_place(compiled, env, mismatch if compiled.may_round_differently else bitwise_mismatch)
    theirs, ours = _copy(compiled, env), _copy(compiled, env)
    for step in compiled.steps:
        step.run(theirs)
    try:
        compiled.run(ours)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    region = compiled.region
    if _shares_memory(compiled, ours, env):
        return "a result shares memory with another tensor, unlike the result of the ops"
    places = [place for step in compiled.steps for _, place in step.makes if isinstance(ours[place], torch.Tensor)]
    for place in (*dict.fromkeys(places), *region.written):
        if found := mismatch(place, theirs[place], ours[place]):
            return found
    return ""


def _copy(compiled: CompiledRegion, env: Environment) -> Environment:
    """Return an environment with copies of the inputs. The copies alias each other as the inputs do."""
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
    """Return a tensor over `storage` with the shape, strides and offset of `tensor`."""
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _shares_memory(compiled: CompiledRegion, ours: Environment, env: Environment) -> bool:
    places = compiled.region.fresh
    inputs = {address_of(values[place]) for place in compiled.region.inputs for values in (ours, env)}
    fresh = [address_of(ours[place]) for place in places if address_of(ours[place])]
    return len(set(fresh)) < len(fresh) or not inputs.isdisjoint(fresh)


def _at(place: int, environments: Callable[[], Sequence[Environment]]) -> Sequence[object]:
    return [env[place] for env in environments()]


def _mismatch(expected: object, found: object, perturbed: Callable[[], Sequence[object]]) -> str:
    if expected is None:  # not needed after the region
        return ""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return f"a result is a {type(found).__name__} in place of a {type(expected).__name__}"
    if (other := layout_difference(expected, found)) and not _is_trimmed(expected, found):
        return other
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        return "" if _is_rounding(expected, found, perturbed) else str(error)
    return ""


def _is_trimmed(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return True if `found` has the shape and strides of `expected`, and less storage behind its last element.

    Some kernels leave temporary values in this storage, such as the terms of `mse_loss`.
    """
    meta = meta_of(found)
    needed = meta.extent * meta.dtype.itemsize
    return meta == meta_of(expected) and needed <= _storage_bytes(found) <= _storage_bytes(expected)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _is_rounding(expected: torch.Tensor, found: torch.Tensor, perturbed: Callable[[], Sequence[object]]) -> bool:
    """Return True if `found` differs from `expected` by about as much as `perturbed` does."""
    finite = expected.isfinite()
    if not expected.is_floating_point() or not torch.equal(_special(expected, finite), _special(found, finite)):
        return False

    def distance(other: object) -> float:
        assert isinstance(other, torch.Tensor)
        return float((other.double() - expected.double())[finite].abs().nan_to_num(0.0, 0.0).max())

    return distance(found) <= _TOLERATED_PERTURBATIONS * max(map(distance, perturbed()))


def _special(tensor: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Map finite numbers to zero, and infinities and NaN to distinct finite numbers, so that they can be compared."""
    return tensor.nan_to_num(1.0, 2.0, 3.0).masked_fill(finite, 0.0)


def _perturbed(compiled: CompiledRegion, env: Environment, seed: int) -> Environment:
    """Run the instructions, and move each value that an instruction makes or writes slightly up or down.

    Return the environment with the perturbed results.
    """
    values, signs = _copy(compiled, env), random.Random(seed)  # noqa: S311 - no secret
    for step in compiled.steps:
        before = {address_of(values[place]) for place in step.reads}
        written = [values[place] for place in step.writes]
        step.run(values)
        sign = signs.choice((-1, 1))
        for tensor in (*written, *_made(step, values, before)):
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.add_(tensor.abs(), alpha=sign * _PERTURBATION_ULPS * torch.finfo(tensor.dtype).eps)
    return values


def _made(step: CompiledStep, values: Environment, before: set[int]) -> Iterator[torch.Tensor]:
    """Return the results of a finished instruction that own their memory."""
    for _, place in step.makes:
        tensor = values[place]
        if isinstance(tensor, torch.Tensor) and address_of(tensor) not in before:
            yield tensor
