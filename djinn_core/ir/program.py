"""The program: instructions in the order in which the user's code issued them.

Storage is flat, because a program is recorded on the hot path. There is one `Call` per instruction. All instructions
share one list of value handles and one list of slots. `Program.instructions()` is the readable view.
"""

from __future__ import annotations

import itertools
import math
import operator
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Final

import attrs
import numpy as np
import torch

from djinn_core.ir.form import Form
from djinn_core.ir.handles import storages_of
from djinn_core.ir.module_path import ModuleCall, ModulePath, is_backward, module_path
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.slot_arrays import Kinds, Words, slot_arrays
from djinn_core.ir.values import TensorMeta
from djinn_core.system.front_end import display_name

Slot = int | float
Outcome = tuple[TensorMeta | None, int, int, int]  # metadata, aliased operand, identical operand, bytes
CONTENT: Final = 0xFFFF_FFFF  # bits of a signature's id that depend on its form and operand classes
_signature_numbers = itertools.count(1)


@attrs.define(eq=False)
class Signature:
    """A form together with the class of each operand: rank, dtype, order of strides, which sizes are 0 or 1.

    Calls of one signature differ in sizes and scalars only. Analysis is cached by signature, and the
    client stores here facts that it learns from replies.

    Attributes:
        layout_trusted: True if the predicted layouts of results were right.
        orders: order of dimensions by result, if the predicted layout was wrong.
        dtypes: dtype by result, for results whose dtype the kernel chooses.
        predicts: True if the client predicts the metadata of results. False if it asks the executor instead.
        id: unique number. Its bits in `CONTENT` are equal in every process. So decisions by these bits, such as the
            positions at which a program is cut, depend on the program alone.
    """

    form: Form
    operand_classes: tuple[object, ...]
    layout_trusted: bool = False
    orders: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    dtypes: dict[int, torch.dtype] | None = None
    predicts: bool = True
    id: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: _unique_id(self.form, self.operand_classes), takes_self=True)
    )


def _unique_id(form: Form, operand_classes: tuple[object, ...]) -> int:
    content = zlib.crc32(repr((form, operand_classes)).encode())
    return next(_signature_numbers) << CONTENT.bit_length() | content


@attrs.frozen(eq=False, repr=False)
class Call(ShortRepr):
    """Everything about an instruction that follows from its op, the metadata of its operands and its scalars.

    Attributes:
        signature: form and operand classes.
        operands: metadata of each tensor operand.
        results: metadata of each result; `None` if the op does not return it.
        aliases: for each result the operand that it shares memory with, or -1.
        inplace: for each result the operand with which it is identical, or -1.
        writes: the operands that the op writes into.
        random: True if the op reads and advances the random state.
        changes: operands whose own metadata the op changes, with the new metadata.
        nbytes: size in bytes of the storage of each result (0 if the result has no storage of its own).
        kind: equal for calls that differ in sizes and scalars only; part of the key of plans.
        refused: True if PyTorch rejects the op on the client, so the executor is asked. Then `results` mean nothing.
        sequence: True if the op returns a list or tuple of results.
        slots: scalars, for a call that is cached by all of its arguments; otherwise None.
        cached_outcome: cached `outcome`, for a call that has recurred.
    """

    signature: Signature
    operands: tuple[TensorMeta, ...]
    results: tuple[TensorMeta | None, ...]
    aliases: tuple[int, ...]
    inplace: tuple[int, ...]
    writes: tuple[int, ...]
    random: bool
    operand_count: int
    slot_count: int
    new_count: int
    changes: tuple[tuple[int, TensorMeta], ...] = ()
    nbytes: tuple[int, ...] = ()
    refused: bool = False
    slots: tuple[Slot, ...] | None = None
    cached_outcome: tuple[Outcome, ...] | None = attrs.field(default=None, init=False)
    sequence: bool = attrs.field(init=False)
    kind: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "sequence", self.signature.form.sequence)
        object.__setattr__(self, "kind", _kind_of(self))

    def of_other_sizes(
        self,
        operands: tuple[TensorMeta, ...],
        results: tuple[TensorMeta | None, ...],
        nbytes: tuple[int, ...],
        slots: tuple[Slot, ...] | None,
    ) -> Call:
        """Copy this call for operands that differ only in size.

        Programs with ever new sizes make one copy for each op of each step, and all copies stay in the cache. So a copy
        owns as few objects as possible: most of the cost of a new size is the garbage collector.
        """
        results = operands if results == operands else results  # one tuple instead of two
        return self._with(operands, results, nbytes, (), slots, None)

    def with_slots(self, slots: tuple[Slot, ...] | None) -> Call:
        """Return this call with these scalars. If `slots` is None, scalars are read from the arguments each time."""
        return self._with(self.operands, self.results, self.nbytes, self.changes, slots, None)

    def _with(self, *values: Any) -> Call:
        """Copy this call, and replace its fields that depend on sizes by `values`, in the order of `_FIELD_SETTERS`."""
        call = _new_call(Call)
        for set_field, value in zip(_FIELD_SETTERS, (*_size_independent_fields(self), *values)):  # noqa: B905 - as many
            set_field(call, value)
        return call

    @property
    def outcome(self) -> Iterator[Outcome]:
        """For each result: its metadata, the aliased operand, the identical operand, and the bytes of its storage."""
        return zip(self.results, self.aliases, self.inplace, self.nbytes, strict=True)

    def cache_outcome(self) -> None:
        """Store `outcome` in `cached_outcome`. Called when a call recurs; calls of new sizes mostly do not."""
        object.__setattr__(self, "cached_outcome", tuple(self.outcome))

    @property
    def op(self) -> str:
        """Overload name, such as `aten::mm`."""
        return self.signature.form.op


# `__init__` of a frozen class with this many fields takes longer than the rest of a call with new sizes.
_SIZE_INDEPENDENT = (
    "signature", "aliases", "inplace", "writes", "random", "operand_count", "slot_count", "new_count", "refused", "sequence",
    "kind"
)  # fmt: skip
_size_independent_fields: Final = operator.attrgetter(*_SIZE_INDEPENDENT)
_FIELD_SETTERS: Final = tuple([  # sets the slot; the class's own `__setattr__` refuses
    vars(Call)[name].__set__ for name in (*_SIZE_INDEPENDENT, "operands", "results", "nbytes", "changes", "slots", "cached_outcome")
])  # fmt: skip
_new_call: Final = object.__new__
KINDS_LIMIT: Final = 65536  # cached kinds; an evicted kind that recurs gets a new number
_kinds: dict[tuple[object, ...], int] = {}
_kind_numbers = itertools.count()


def _kind_of(call: Call) -> int:
    """Return the number of a call's kind: its signature, and its operands and results without sizes."""
    operands = tuple([m.tensor_class for m in call.operands])
    results = tuple([m and (m.dtype, len(m.shape), m.device, m.conj, m.neg) for m in call.results])
    key = (call.signature.id, operands, results, call.random, call.inplace, call.aliases, call.writes)
    if len(_kinds) >= KINDS_LIMIT:
        _kinds.clear()
    return _kinds.setdefault(key, next(_kind_numbers))


@attrs.frozen
class Instruction:
    """One op of a program, unpacked.

    Attributes:
        index: position in the program.
        call: its form, metadata of operands and results, aliases and writes.
        inputs: handles of its inputs.
        outputs: handles of its new outputs.
        slots: its scalars.
    """

    index: int
    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def op(self) -> str:
        """Overload name, such as `aten::mm`."""
        return self.call.op

    @property
    def writes(self) -> tuple[int, ...]:
        """Handles of the values that the op writes into."""
        return tuple(self.inputs[i] for i in self.call.writes)


Site = tuple[CodeType, int]


def line_of_site(site: Site) -> int:
    """Return the source line of an instruction, given its position in a code object."""
    code, offset = site
    positions = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    return positions[0] if positions and positions[0] is not None else code.co_firstlineno


def describe_site(site: Site) -> str:
    """Return `file:line in function` for an instruction, given its position in a code object."""
    code, _ = site
    return f"{display_name(code.co_filename)}:{line_of_site(site)} in {code.co_name}"


@attrs.frozen(eq=False, repr=False)
class Program(ShortRepr):
    """A recorded program: instructions in program order. `Graph` is a more convenient view.

    Attributes:
        calls: one per instruction.
        operands: per instruction the handles of its inputs, then of its new outputs, flattened.
        slots: per instruction its scalars, flattened.
        dead: handles among the operands that the client no longer holds when the program ends.
        sites: for each instruction, the code object and bytecode offset of the user's code that issued it; empty if
            unknown. A site is resolved to a line only on request.
        modules: for each instruction, the module call that issued it; empty if unknown.
    """

    calls: tuple[Call, ...]
    operands: tuple[int, ...]
    slots: tuple[Slot, ...]
    dead: frozenset[int] = frozenset()
    sites: tuple[Site, ...] = ()
    modules: tuple[ModuleCall | None, ...] = ()

    def __len__(self) -> int:
        return len(self.calls)

    def cut(self, starts: Iterable[int]) -> list[Program]:
        """Cut the program before the instructions `starts`. Each value dies in the last piece that uses it."""
        operands = slots = 0
        before = [(0, 0)]
        for call in self.calls:
            operands += call.operand_count + call.new_count
            slots += call.slot_count
            before.append((operands, slots))
        pieces: list[Program] = []
        later: set[int] = set()
        for first, end in reversed([*itertools.pairwise([0, *starts, len(self.calls)])]):
            (operand, slot), (last, number) = before[first], before[end]
            mentioned = self.operands[operand:last]
            dead = self.dead.intersection(mentioned) - later
            later |= dead
            sites, modules = self.sites[first:end], self.modules[first:end]
            pieces.append(Program(self.calls[first:end], mentioned, self.slots[slot:number], dead, sites, modules))
        return pieces[::-1]

    @property
    def size(self) -> int:
        """Number of handles and scalars of the program."""
        return len(self.operands) + len(self.slots)

    @property
    def values(self) -> Words:
        """Distinct operands, in order of first appearance."""
        return np.array([*dict.fromkeys(self.operands)], np.int64)

    @property
    def scalars(self) -> tuple[Words, Kinds]:
        """The slots as two arrays: their bits and their types."""
        return slot_arrays(self.slots)

    @property
    def structure(self) -> Hashable:
        """Key that is equal for programs with equal kinds of calls, data flow, value lifetimes and aliasing of inputs."""
        numbers: dict[int, int] = {}
        flow = tuple([numbers.setdefault(value, len(numbers)) for value in self.operands])
        dying = tuple([number for value, number in numbers.items() if value in self.dead])
        storages: dict[int, int] = {}
        alias_groups = tuple([storages.setdefault(s, len(storages)) for s in storages_of([*self.inputs()])])
        return tuple([call.kind for call in self.calls]), flow, alias_groups, dying

    @property
    def exact(self) -> Hashable:
        """Key that is equal for programs of one structure with equal calls and slots."""
        return self.calls, self.slots

    @property
    def call_numbers(self) -> tuple[int, Words] | None:
        """A key, and a number for each call. None if the calls have no numbers.

        Under equal keys, equal numbers are equal calls.
        """
        return None

    def call(self, index: int) -> Call:
        """Return the call of an instruction."""
        return self.calls[index]

    def inputs(self) -> dict[int, tuple[int, int]]:
        """The values that the program does not compute, each with its first call and its operand position in that call."""
        inputs: dict[int, tuple[int, int]] = {}
        outputs: set[int] = set()
        for instruction in self.instructions():
            for position, value in enumerate(instruction.inputs):
                if value not in outputs:
                    inputs.setdefault(value, (instruction.index, position))
            outputs.update(instruction.outputs)
        return inputs

    def instructions(self) -> Iterator[Instruction]:
        """The instructions in program order, unpacked."""
        at = slot = 0
        for index, call in enumerate(self.calls):
            middle, end = at + call.operand_count, at + call.operand_count + call.new_count
            slots = self.slots[slot : slot + call.slot_count]
            yield Instruction(index, call, self.operands[at:middle], self.operands[middle:end], slots)
            at, slot = end, slot + call.slot_count

    def site(self, index: int) -> str:
        """Return the user's line that issued instruction `index`, or an empty string."""
        return describe_site(self.sites[index]) if 0 <= index < len(self.sites) else ""

    def module_path(self, index: int) -> ModulePath | None:
        """Return the current path of the module that issued instruction `index`; None outside all modules."""
        return module_path(self.modules[index]) if 0 <= index < len(self.modules) else None

    def is_backward(self, index: int) -> bool:
        """Return True if a backward pass issued instruction `index`."""
        return is_backward(self.modules[index]) if 0 <= index < len(self.modules) else False


def conditions_hold(equal_slots: tuple[tuple[int, int], ...], slots: Sequence[Slot]) -> bool:
    """Return True if a program's scalars satisfy a plan's conditions: the pairs of positions with equal scalars."""
    return all(interchangeable(slots[first], slots[second]) for first, second in equal_slots)


def interchangeable(first: Slot, second: Slot) -> bool:
    """Return True if ops give equal results for both numbers. 1 and 1.0 differ in type, 0.0 and -0.0 in sign."""
    if type(first) is not type(second) or (first != second and not (first != first and second != second)):  # noqa: PLR0124 - nan
        return False
    return (bool(first) and first == second) or math.copysign(1, first) == math.copysign(1, second)


_NANS: Final = (math.nan, -math.nan)


def canonical_nan(number: float) -> float:
    """Return the canonical nan with the sign of the nan `number`. In keys and tuples, a nan object equals only itself."""
    return _NANS[math.copysign(1, number) < 0]
