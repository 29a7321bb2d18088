"""Compare the results of a compiled region with the results of its instructions. Both run on copies.

The results may differ by rounding. Ill-conditioned computations amplify rounding: for example a sum of terms that
cancel, or a step of Adam with a gradient near zero. If a difference exceeds the default tolerances of
`torch.testing.assert_close`, the instructions run again, with each intermediate value perturbed by some units in the
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
    """Return how the results of a compiled region on `env` differ from the results of its instructions.

    The text is empty if they agree. `env` is unchanged.

    Raises:
        Exception: any error of an instruction.
    """

    @cache
    def perturbed() -> Sequence[Environment]:
        return [_perturbed(compiled, env, seed) for seed in range(_PERTURBED_RUNS)]

    def mismatch(place: int, expected: object, mismatch_text: object) -> str:
        return _mismatch(expected, mismatch_text, partial(_values_at, place, perturbed))

    if isinstance(compiled, RecordedRegion):
        return difference_in_place(compiled, env, mismatch if compiled.may_round_differently else bitwise_mismatch)
    op_results, compiled_results = _copy(compiled, env), _copy(compiled, env)
    for step in compiled.steps:
        step.run(op_results)
    try:
        compiled.run(compiled_results)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    region = compiled.region
    if _shares_memory(compiled, compiled_results, env):
        return "a result shares memory with another tensor, unlike the result of the ops"
    places = [
        place for step in compiled.steps for _, place in step.makes if isinstance(compiled_results[place], torch.Tensor)
    ]
    for place in (*dict.fromkeys(places), *region.written_inputs):
        if mismatch_text := mismatch(place, op_results[place], compiled_results[place]):
            return mismatch_text
    return ""


def _copy(compiled: CompiledRegion, env: Environment) -> Environment:
    """Return an environment with copies of the inputs. The copies alias each other as the inputs do."""
    copy = list(env)
    region = compiled.region
    storages = {
        address_of(env[place]): env[place].untyped_storage().clone()
        for place in region.inputs
        if place in region.written_inputs or env[place].nbytes <= COPIED_BYTES
    }
    for place in region.inputs:
        if (storage := storages.get(address_of(env[place]))) is not None:
            copy[place] = _twin(env[place], storage)
    return copy


def _twin(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over `storage` with the shape, strides and offset of `tensor`."""
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _shares_memory(compiled: CompiledRegion, actual: Environment, env: Environment) -> bool:
    places = compiled.region.owned_results
    inputs = {address_of(values[place]) for place in compiled.region.inputs for values in (actual, env)}
    addresses = [address_of(actual[place]) for place in places if address_of(actual[place])]
    return len(set(addresses)) < len(addresses) or not inputs.isdisjoint(addresses)


def _values_at(place: int, environments: Callable[[], Sequence[Environment]]) -> Sequence[object]:
    return [env[place] for env in environments()]


def _mismatch(expected: object, actual: object, perturbed: Callable[[], Sequence[object]]) -> str:
    if expected is None:  # not needed after the region
        return ""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return f"a result is a {type(actual).__name__} in place of a {type(expected).__name__}"
    if (layout := layout_difference(expected, actual)) and not _is_trimmed(expected, actual):
        return layout
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError as error:
        return "" if _is_rounding(expected, actual, perturbed) else str(error)
    return ""


def _is_trimmed(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return True if `actual` has the shape and strides of `expected`, but a smaller storage.

    Some kernels leave temporary values behind the last element of their result, such as the terms of `mse_loss`.
    """
    meta = meta_of(actual)
    needed_bytes = meta.extent * meta.dtype.itemsize
    return meta == meta_of(expected) and needed_bytes <= _storage_bytes(actual) <= _storage_bytes(expected)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _is_rounding(expected: torch.Tensor, actual: torch.Tensor, perturbed: Callable[[], Sequence[object]]) -> bool:
    """Return True if `actual` differs from `expected` by about as much as the results of `perturbed()` do."""
    finite = expected.isfinite()
    if not expected.is_floating_point() or not torch.equal(_special(expected, finite), _special(actual, finite)):
        return False

    def distance(other: object) -> float:
        assert isinstance(other, torch.Tensor)
        return float((other.double() - expected.double())[finite].abs().nan_to_num(0.0, 0.0).max())

    return distance(actual) <= _TOLERATED_PERTURBATIONS * max(map(distance, perturbed()))


def _special(tensor: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is zero at finite numbers, and a distinct number at NaN and each infinity."""
    return tensor.nan_to_num(1.0, 2.0, 3.0).masked_fill(finite, 0.0)


def _perturbed(compiled: CompiledRegion, env: Environment, seed: int) -> Environment:
    """Run the instructions on a copy of `env`, and return the copy with perturbed results.

    After each instruction, its results and written operands are scaled up or down by some units in the last place.
    """
    values, signs = _copy(compiled, env), random.Random(seed)  # noqa: S311 - no secret
    for step in compiled.steps:
        before = {address_of(values[place]) for place in step.reads}
        tensors = [values[place] for place in step.writes]
        step.run(values)
        sign = signs.choice((-1, 1))
        for tensor in (*tensors, *_owned_results(step, values, before)):
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.add_(tensor.abs(), alpha=sign * _PERTURBATION_ULPS * torch.finfo(tensor.dtype).eps)
    return values


def _owned_results(step: CompiledStep, values: Environment, before: set[int]) -> Iterator[torch.Tensor]:
    """Return the results of a finished instruction that own their memory. `before`: addresses of its operands."""
    for _, place in step.makes:
        tensor = values[place]
        if isinstance(tensor, torch.Tensor) and address_of(tensor) not in before:
            yield tensor
