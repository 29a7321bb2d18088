"""The program: instructions in the order in which the user's code issued them.

Storage is flat, because a program is recorded on the hot path: one `Call` per instruction, and for all instructions
together one list of value handles and one of slots. `Program.instructions()` is the readable view.
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
from djinn_core.system.front_end import called

Slot = int | float
Outcome = tuple[TensorMeta | None, int, int, int]  # metadata, operand aliased, operand that it is, bytes
CONTENT: Final = 0xFFFF_FFFF  # bits of a signature's id that follow from its form and operand classes
_signature_numbers = itertools.count(1)


@attrs.define(eq=False)
class Signature:
    """A form together with the class of each operand: rank, dtype, order of strides, which sizes are 0 or 1.

    Calls of one signature differ in sizes and scalars only. Analysis is cached by signature; whether the executor lays
    results out as the client predicted (`layout_trusted`), and in which order of dimensions it lays them out where it does
    not (`orders`, by result), is learnt by signature; so are the dtypes of results (`dtypes`, by result) that kernels choose.
    Where nothing is predicted (`predicts`), because the executor was asked, there is nothing to confirm.

    `id` is unique. Its bits in `CONTENT` are the same in every process, so that what is chosen by them, such as where a program
    is cut, depends on the program alone.
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
        results: metadata of each result; `None` where the op returns nothing there.
        aliases: for each result the operand that it shares memory with, or -1.
        inplace: for each result the operand that it *is*, or -1.
        writes: the operands that the op writes into.
        random: whether the op reads and advances the random state.
        changes: operands whose own metadata the op changes, with the new metadata.
        nbytes: size in bytes of the storage of each result (0 if the result has none of its own).
        kind: the same number for calls that differ in sizes and scalars only: plans are looked up by it.
        refused: whether PyTorch says here that the op cannot be done, and the executor is asked; then `results` mean nothing.
        slots: the scalars of a call that is remembered by all of its arguments.
        kept_outcome: `outcome` of a call that has come again, which is then made once.
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
    kept_outcome: tuple[Outcome, ...] | None = attrs.field(default=None, init=False)
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
        """This call with operands of the same classes and other sizes, which changes the metadata of none.

        Programs of ever new sizes make one for each op of each step, and all are kept. So each has as few parts of its own as
        possible: most of the cost of a new size is the garbage collector, which visits each part again and again.
        """
        shared = operands if results == operands else results
        return self._with(operands, shared, nbytes, (), slots, None)

    def with_slots(self, slots: tuple[Slot, ...] | None) -> Call:
        """This call with these scalars; None: they are gathered from the arguments each time."""
        return self._with(self.operands, self.results, self.nbytes, self.changes, slots, None)

    def _with(self, *parts: Any) -> Call:
        """A copy but for the last parts of `_PUT`."""
        call = _new_call(Call)
        for put, part in zip(_PUT, (*_PARTS(self), *parts)):  # noqa: B905 - as many
            put(call, part)
        return call

    @property
    def outcome(self) -> Iterator[Outcome]:
        """Of each result its metadata, the operand that it aliases, the one that it is, and the bytes of its storage."""
        return zip(self.results, self.aliases, self.inplace, self.nbytes, strict=True)

    def keep_outcome(self) -> None:
        """Make `kept_outcome`. Calls of sizes that never come again do without it."""
        object.__setattr__(self, "kept_outcome", tuple(self.outcome))

    @property
    def op(self) -> str:
        """Overload name, such as `aten::mm`."""
        return self.signature.form.op


# `__init__` of a frozen class with as many fields takes longer than all else that a call of new sizes costs.
_WHATEVER_THE_SIZES = (
    "signature", "aliases", "inplace", "writes", "random", "operand_count", "slot_count", "new_count", "refused", "sequence",
    "kind"
)  # fmt: skip
_PARTS: Final = operator.attrgetter(*_WHATEVER_THE_SIZES)
_PUT: Final = tuple([  # by slot, which the class's own `__setattr__` refuses
    vars(Call)[name].__set__ for name in (*_WHATEVER_THE_SIZES, "operands", "results", "nbytes", "changes", "slots", "kept_outcome")
])  # fmt: skip
_new_call: Final = object.__new__
KINDS_LIMIT: Final = 65536  # remembered kinds; one that was forgotten and comes again has another number
_kinds: dict[tuple[object, ...], int] = {}
_kind_numbers = itertools.count()


def _kind_of(call: Call) -> int:
    """The number of a call's kind: of its signature, and of its operands and results but their sizes."""
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
        inputs, outputs: handles of its inputs and of its new outputs.
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
    """The line of the place in a code object where an instruction was issued."""
    code, offset = site
    positions = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    return positions[0] if positions and positions[0] is not None else code.co_firstlineno


def describe_site(site: Site) -> str:
    """`file:line in function` for the place in a code object where an instruction was issued."""
    code, _ = site
    return f"{called(code.co_filename)}:{line_of_site(site)} in {code.co_name}"


@attrs.frozen(eq=False, repr=False)
class Program(ShortRepr):
    """Instructions in program order. `Graph` shows the same in a handier way.

    Attributes:
        calls: one per instruction.
        operands: per instruction the handles of its inputs, then of its new outputs, all in one tuple.
        slots: per instruction its scalars, all in one tuple.
        dead: handles among the operands that the client no longer holds when the program ends.
        sites: one per instruction, or empty: the place in the user's code that issued it (code object and bytecode offset,
            resolved to a line only on request).
        modules: one per instruction, or empty: the call of a module inside which it was issued.
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
        """The program in pieces, of which all but the first begin with these instructions. A value dies with the last that mentions it."""
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
        """Number of its handles and scalars."""
        return len(self.operands) + len(self.slots)

    @property
    def values(self) -> Words:
        """The operands by first appearance."""
        return np.array([*dict.fromkeys(self.operands)], np.int64)

    @property
    def scalars(self) -> tuple[Words, Kinds]:
        """The slots as arrays."""
        return slot_arrays(self.slots)

    @property
    def structure(self) -> Hashable:
        """Equal for programs whose calls are of the same kinds, whose values flow and die alike, and whose inputs share memory alike."""
        numbers: dict[int, int] = {}
        flow = tuple([numbers.setdefault(value, len(numbers)) for value in self.operands])
        dying = tuple([number for value, number in numbers.items() if value in self.dead])
        storages: dict[int, int] = {}
        shared = tuple([storages.setdefault(s, len(storages)) for s in storages_of([*self.inputs()])])
        return tuple([call.kind for call in self.calls]), flow, shared, dying

    @property
    def exact(self) -> Hashable:
        """Equal for programs of one structure with equal calls and slots."""
        return self.calls, self.slots

    @property
    def call_numbers(self) -> tuple[int, Words] | None:
        """The numbers of the calls, and a value that is equal for programs whose numbers can be compared; None without numbers."""
        return None

    def call(self, index: int) -> Call:
        """The call of an instruction."""
        return self.calls[index]

    def inputs(self) -> dict[int, tuple[int, int]]:
        """The values that the program does not make, each with the first call that takes it and its position there."""
        found: dict[int, tuple[int, int]] = {}
        made: set[int] = set()
        for instruction in self.instructions():
            for position, value in enumerate(instruction.inputs):
                if value not in made:
                    found.setdefault(value, (instruction.index, position))
            made.update(instruction.outputs)
        return found

    def instructions(self) -> Iterator[Instruction]:
        """The instructions, unpacked one after the other."""
        at = slot = 0
        for index, call in enumerate(self.calls):
            middle, end = at + call.operand_count, at + call.operand_count + call.new_count
            slots = self.slots[slot : slot + call.slot_count]
            yield Instruction(index, call, self.operands[at:middle], self.operands[middle:end], slots)
            at, slot = end, slot + call.slot_count

    def site(self, index: int) -> str:
        """The user's line that issued instruction `index`, or an empty string."""
        return describe_site(self.sites[index]) if 0 <= index < len(self.sites) else ""

    def module_path(self, index: int) -> ModulePath | None:
        """The module inside which instruction `index` was issued, as the model names it now; None outside all modules."""
        return module_path(self.modules[index]) if 0 <= index < len(self.modules) else None

    def is_backward(self, index: int) -> bool:
        """True if a backward pass issued instruction `index`."""
        return is_backward(self.modules[index]) if 0 <= index < len(self.modules) else False


def conditions_hold(equal_slots: tuple[tuple[int, int], ...], slots: Sequence[Slot]) -> bool:
    """True if the scalars of a program are equal wherever a plan needs them to be."""
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
