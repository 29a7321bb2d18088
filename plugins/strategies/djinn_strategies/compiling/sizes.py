"""Infer how sizes and numbers of a template vary between runs, as linear functions of one size.

At each decode step, the KV cache is longer: sizes, strides and numbers are `a * n + b` with one `n` per run. This
relation is inferred from a few runs. A guard checks it before each later run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import attrs
import msgspec
import torch

from djinn_core.ir.values import TensorMeta, tensor_meta

MIN_SIZE: Final = 2  # kernels and compilers treat sizes of 0 and 1 specially: broadcasting, strides
Slots = tuple[int | float, ...]
_exact = msgspec.msgpack.Encoder().encode  # distinguishes an int from a float, and 0.0 from -0.0


@attrs.frozen
class ObservedRun:
    """Shapes and numbers of one run.

    Attributes:
        metas: metadata of the region's inputs.
        slots: numeric arguments of all ops of the template.
    """

    metas: tuple[TensorMeta, ...]
    slots: Slots


@attrs.frozen
class LinearSize:
    """The linear function `times * n + plus`."""

    times: int
    plus: int

    def value_at(self, n: int) -> int:
        """Return the value for `n`."""
        return self.times * n + self.plus


@attrs.frozen
class SizeRelation:
    """How sizes, strides and slots vary between runs.

    Attributes:
        example: the run from which constant sizes and numbers are taken.
        base: source of `n`: the index of an input and a dimension, or a slot. None if nothing varies.
        sizes: varying sizes, by index of the input and dimension.
        strides: varying strides, by index of the input and dimension.
        slots: varying integers, by slot.
        min_n: the least `n` for which every varying size is at least `MIN_SIZE`.
        float_slots: slots that may have any float value in each run.
        used_slots: slots that the region uses.
    """

    example: ObservedRun
    base: tuple[int, int] | int | None = None
    sizes: dict[int, dict[int, LinearSize]] = attrs.field(factory=dict)
    strides: dict[int, dict[int, LinearSize]] = attrs.field(factory=dict)
    slots: dict[int, LinearSize] = attrs.field(factory=dict)
    min_n: int = 0
    float_slots: tuple[int, ...] = ()
    used_slots: range = attrs.field()

    @used_slots.default
    def _all_slots(self) -> range:
        return range(len(self.example.slots))

    def guard(self) -> SizeGuard:
        """Return a guard that checks this relation."""
        return SizeGuard(self)


@attrs.frozen
class NonlinearSlots:
    """Slots that vary and are not linear functions of `n`, although all sizes are."""

    slots: frozenset[int]


def infer_size_relation(
    observed: Sequence[ObservedRun],
    liftable: Collection[int] = (),
    keep_constant: bool = True,
    used_slots: range | None = None,
    *,
    counters: bool = False,
) -> SizeRelation | NonlinearSlots | None:
    """Return the relation that all runs in `observed` follow. The last run is its example.

    Return `NonlinearSlots` if only some slots follow no relation, and None if sizes follow none.

    Args:
        observed: at least one run.
        liftable: slots that may have any value in each run if they are floats.
        keep_constant: True if a liftable slot that was constant so far has to stay constant.
        used_slots: slots that the region uses. If None, all slots.
        counters: True if `n` may be a slot when no size varies, such as the position in a preallocated cache.
    """
    example = observed[-1]
    used_slots = range(len(example.slots)) if used_slots is None else used_slots
    flat = [_flat(run, used_slots) for run in observed]
    if len({len(numbers) for numbers in flat}) > 1 or len({tuple(m.dtype for m in run.metas) for run in observed}) > 1:
        return None
    differing = [key for key in flat[-1] if len({_exact(numbers.get(key)) for numbers in flat}) > 1]
    fractions = [i for i in sorted(liftable) if all(type(run.slots[i]) is float for run in observed)]
    floats = tuple([i for i in fractions if not keep_constant or ("slot", i) in differing])
    differing = [key for key in differing if key[0] != "slot" or key[1] not in floats]
    if not differing:
        return SizeRelation(example, float_slots=floats, used_slots=used_slots)
    base = next((key for key in differing if key[0] == "size"), None)
    if base is None and counters:
        base = next((key for key in differing if all(type(numbers.get(key)) is int for numbers in flat)), None)
    lines = {} if base is None else _fit_lines(flat, differing, base)
    if len(lines) < len(differing):
        nonlinear = [key for key in differing if key not in lines]
        slots = frozenset([key[1] for key in nonlinear if key[0] == "slot"])
        return NonlinearSlots(slots) if len(slots) == len(nonlinear) else None
    assert base is not None
    return attrs.evolve(_relation(example, base, lines), float_slots=floats, used_slots=used_slots)


Key = tuple[Any, ...]


def _fit_lines(flat: Sequence[dict[Key, int | float]], differing: Sequence[Key], base: Key) -> dict[Key, LinearSize]:
    """Return the varying numbers that are linear functions of the number `base`."""
    n = [numbers[base] for numbers in flat]
    values = {key: [numbers.get(key) for numbers in flat] for key in differing}
    lines = {key: _fit_line(n, some) for key, some in values.items() if all(isinstance(value, int) for value in some)}
    return {key: line for key, line in lines.items() if line is not None}


def _flat(run: ObservedRun, used_slots: range) -> dict[Key, int | float]:
    """Return all sizes, strides and used slots of a run in one mapping."""
    flat: dict[Key, int | float] = {("slot", i): run.slots[i] for i in used_slots}
    for index, meta in enumerate(run.metas):
        flat |= {("size", index, dim): size for dim, size in enumerate(meta.shape)}
        flat |= {("stride", index, dim): stride for dim, stride in enumerate(meta.stride)}
    return flat


def _fit_line(n: Sequence[Any], values: Sequence[Any]) -> LinearSize | None:
    first = n[0]
    second = next((i for i, value in enumerate(n) if value != first), None)
    if second is None:
        return None
    times, remainder = divmod(values[second] - values[0], n[second] - first)
    line = LinearSize(times, values[0] - times * first)
    return line if not remainder and all(line.value_at(a) == b for a, b in zip(n, values, strict=True)) else None


def _relation(example: ObservedRun, base: Key, lines: dict[Key, LinearSize]) -> SizeRelation:
    smallest = _smallest([line for key, line in lines.items() if key[0] == "size"])
    relation = SizeRelation(example, base[1] if base[0] == "slot" else (base[1], base[2]), min_n=smallest)
    for key, line in lines.items():
        if key[0] == "slot":
            relation.slots[key[1]] = line
        else:
            sizes = relation.sizes if key[0] == "size" else relation.strides
            sizes.setdefault(key[1], {})[key[2]] = line
    return relation


def _smallest(sizes: Sequence[LinearSize]) -> int:
    return max([MIN_SIZE, *[-(-(MIN_SIZE - line.plus) // line.times) for line in sizes if line.times > 0]])


class SizeGuard:
    """Checks that a run follows a size relation. It runs before each run of compiled code."""

    def __init__(self, relation: SizeRelation) -> None:
        self._relation = relation
        metas = relation.example.metas
        varying = set(relation.sizes) | set(relation.strides)
        self._fixed_inputs = [(i, m.shape, m.stride, m.dtype) for i, m in enumerate(metas) if i not in varying]
        self._varying_inputs = [
            (i, metas[i], relation.sizes.get(i, {}), relation.strides.get(i, {})) for i in sorted(varying)
        ]
        self._used, self._variable_slots = relation.used_slots, {*relation.slots, *relation.float_slots}
        self._slots = _exact(self._fixed_slots(relation.example.slots))

    def _fixed_slots(self, slots: Sequence[int | float]) -> list[int | float]:
        if not self._variable_slots:
            return list(slots[self._used.start : self._used.stop])
        return [0 if i in self._variable_slots else slots[i] for i in self._used]

    def check(self, tensors: Sequence[Any], slots: Sequence[int | float], spare: Collection[int] = ()) -> int | None:
        """Return the size `n` of a run, 0 if nothing varies, or None if the run does not follow the relation.

        `spare`: indices of inputs whose strides are not checked, because they may have spare memory.
        """
        for tensor in tensors:
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                return None
        for index, shape, stride, dtype in self._fixed_inputs:
            tensor = tensors[index]
            if tensor.shape != shape or tensor.stride() != stride or tensor.dtype is not dtype or tensor.is_neg():
                return None
        if _exact(self._fixed_slots(slots)) != self._slots or any(
            type(slots[i]) is not float for i in self._relation.float_slots
        ):
            return None
        return self._check_varying(tensors, slots, spare) if self._relation.base is not None else 0

    def _check_varying(
        self, tensors: Sequence[Any], slots: Sequence[int | float], spare: Collection[int]
    ) -> int | None:
        assert self._relation.base is not None
        n = _value_of(self._relation.base, tensors, slots)
        if n is None or n < self._relation.min_n:
            return None
        for index, meta, sizes, strides in self._varying_inputs:
            tensor = tensors[index]
            shape = tuple([sizes[d].value_at(n) if d in sizes else size for d, size in enumerate(meta.shape)])
            stride = tuple([strides[d].value_at(n) if d in strides else step for d, step in enumerate(meta.stride)])
            if tensor.shape != shape or tensor.dtype is not meta.dtype or tensor.is_neg():
                return None
            if index not in spare and tensor.stride() != stride:
                return None
        for index, line in self._relation.slots.items():
            slot = slots[index]
            if type(slot) is not int or slot != line.value_at(n):
                return None
        return n


def _value_of(base: tuple[int, int] | int, tensors: Sequence[Any], slots: Sequence[int | float]) -> int | None:
    """Return the size `n` of a run, or None if its inputs have no such dimension or slot."""
    if isinstance(base, int):
        number = slots[base]
        return number if type(number) is int else None
    source, dimension = base
    return int(tensors[source].shape[dimension]) if tensors[source].dim() > dimension else None


def observe(tensors: Sequence[Any], slots: Sequence[int | float]) -> ObservedRun | None:
    """Return the shapes and numbers of a run, or None if an input is not a plain strided tensor of real numbers."""
    metas: list[TensorMeta] = []
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        if tensor.dtype.is_complex or tensor.is_neg():
            return None
        metas.append(tensor_meta(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype))
    return ObservedRun(tuple(metas), tuple(slots))
