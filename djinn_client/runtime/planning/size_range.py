"""Range of sizes for which a plan holds.

A plan depends on the data flow. Sizes affect only costs, which change gradually. So a plan serves programs with sizes
within a factor of its own sizes. 0 and 1, which broadcast and end loops, are distinguished by the kinds of calls. Sizes
of weights must be equal, because they distinguish models of one architecture.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from djinn_core.ir.form import Argument, Form, ListArg, Operand, slots_taken
from djinn_core.ir.op_families import CONVOLUTION, POOLING, weights_in
from djinn_core.ir.operators import OWN_OPERATORS, split_name
from djinn_core.ir.program import Call, Program, Slot
from djinn_core.ir.values import TensorMeta
from djinn_core.torch_private import schema_named

FACTOR: Final = 16  # factor if all plugins in use tolerate growth
NARROW_FACTOR: Final = 4  # factor if a plugin does not, so that it plans again sooner
InputOperand = tuple[int, int]  # a call of a program, and a position among its operands

_NOT_SIZES = CONVOLUTION | POOLING  # strides and kernel sizes, which belong to a model
_CALCULATING = frozenset({  # the value does not affect the data flow
    "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "eq", "fill", "full", "full_like", "ge", "gt", "le",
    "lerp", "lt", "masked_fill", "mul", "ne", "rsub", "scalar_tensor", "sub", "true_divide", "where",
})  # fmt: skip
_TYPED: Final = re.compile(
    r"\b(SymInt|Scalar|float|Tensor)\S* (\w+)\b"
)  # types that matter, and parameter names in a schema
_RANGES = frozenset({"arange"})  # numbers of any type that are the size of the result


class SizeRange(msgspec.Struct, frozen=True):
    """Sizes of inputs and size scalars of a plan's program.

    Attributes:
        inputs: for each input of the program, the first operand that reads it.
        weights: for each input, True if it is certainly a weight.
        metas: metadata of the inputs.
        numbers: positions, among the slots, of the size scalars.
        sizes: the size scalars.
        factor: a size in the range is at least the plan's size divided by `factor`, and at most `factor` times it.
    """

    inputs: tuple[InputOperand, ...]
    weights: tuple[bool, ...]
    metas: tuple[TensorMeta, ...]
    numbers: tuple[int, ...]
    sizes: tuple[Slot, ...]
    factor: int

    def covers(self, program: Program) -> bool:
        """Return True if a program of this structure has sizes in the range."""
        calls, slots = program.calls, program.slots
        for (call, operand), weight, meta in zip(self.inputs, self.weights, self.metas, strict=True):
            other = calls[call].operands[operand]
            if other is not meta and (weight or not self._are_near(meta.shape, other.shape)):
                return False
        return self._are_near(self.sizes, [slots[p] for p in self.numbers])

    def covers_parts(self, program: Program, inputs: Iterable[int], sizes: Iterable[tuple[int, Slot]]) -> bool:
        """Return True if some inputs and sizes of a program are in the range.

        Args:
            program: the program.
            inputs: indexes of the inputs to check.
            sizes: (index in `numbers`, size) of the sizes to check.
        """
        for i in inputs:
            (call, operand), meta = self.inputs[i], self.metas[i]
            other = program.call(call).operands[operand]
            if other is not meta and (self.weights[i] or not self._are_near(meta.shape, other.shape)):
                return False
        return all(self._are_near((self.sizes[i],), (slot,)) for i, slot in sizes)

    def _are_near(self, sizes: Sequence[Slot], other_sizes: Sequence[Slot]) -> bool:
        factor = self.factor
        for size, other in zip(sizes, other_sizes, strict=True):
            if size == other:
                continue
            if (size < 0) != (other < 0):
                return False
            small, large = abs(size), abs(other)
            if large < small:
                small, large = large, small
            if large > factor * max(small, 1):
                return False
        return True


def size_range(program: Program, inputs: Iterable[InputOperand], numbers: Sequence[int], factor: int) -> SizeRange:
    """Return the range around the sizes of `program`.

    `inputs`, `numbers` and `factor` are as in `SizeRange`.
    """
    calls = program.calls
    input_operands = tuple(inputs)
    return SizeRange(
        inputs=input_operands,
        weights=tuple(_are_weights(calls, input_operands)),
        metas=tuple([calls[call].operands[operand] for call, operand in input_operands]),
        numbers=tuple(numbers),
        sizes=tuple([program.slots[p] for p in numbers]),
        factor=factor,
    )


def _are_weights(calls: Sequence[Call], inputs: Iterable[InputOperand]) -> Iterator[bool]:
    """Yield, for each operand, True if it is certainly a weight. Operands of one call are adjacent."""
    last, weights = -1, weights_in(calls[0])
    for call, operand in inputs:
        if call != last:
            last, weights = call, weights_in(calls[call])
        yield operand in weights


class SlotKind(IntEnum):
    """Purpose of a scalar of an op, as the op's schema says."""

    SIZE = 1  # a length, start or shape
    QUANTITY = 2  # a number in a computation
    MODE = 3  # any other scalar: it may select the op's behaviour
    INDEX = 4  # its value does not change the op's behaviour


def slot_kinds(call: Call) -> tuple[SlotKind, ...]:
    """Return the kind of each slot of a call."""
    return _slot_kinds(call.signature.form)


@functools.lru_cache(maxsize=16384)
def _slot_kinds(form: Form) -> tuple[SlotKind, ...]:
    kinds = _kinds_of(form.op)
    slot_kinds: list[SlotKind] = []
    for position, argument in enumerate(form.args):
        kind = kinds[position][1] if position < len(kinds) else SlotKind.MODE
        slot_kinds += [kind] * _slot_count(argument)
    by_name = dict(kinds)
    for name, argument in form.kwargs:
        slot_kinds += [by_name.get(name, SlotKind.MODE)] * _slot_count(argument)
    return tuple(slot_kinds)


def _slot_count(argument: Argument) -> int:
    if isinstance(argument, ListArg):
        return sum([_slot_count(item) for item in argument.items if type(item) is not Operand])
    return slots_taken(argument)


@functools.cache
def _kinds_of(op: str) -> tuple[tuple[str, SlotKind], ...]:
    """Return (name, kind) for each parameter of an op. Return an empty tuple if the op has no sizes or is unknown."""
    if op in OWN_OPERATORS:
        return ()
    packet, overload = split_name(op)
    try:
        schema = schema_named(f"aten::{packet}", "" if overload == "default" else overload)
    except RuntimeError:
        return ()
    names = [a.name for a in schema.arguments]
    if packet in _NOT_SIZES:
        return ()
    if packet in _RANGES:
        return tuple((name, SlotKind.SIZE) for name in names)
    types = {name: type_ for type_, name in _TYPED.findall(str(schema))}
    return tuple((name, _kind_of(packet.removesuffix("_"), name, types.get(name))) for name in names)


def _kind_of(packet: str, name: str, type_: str | None) -> SlotKind:
    if type_ == "SymInt":
        return SlotKind.INDEX if name == "index" else SlotKind.SIZE
    if packet in _CALCULATING and type_ is not None:
        return SlotKind.QUANTITY
    return SlotKind.MODE
