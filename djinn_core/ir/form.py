"""Call forms: the op, and the positions of its operands, scalars and constants.

A form holds everything about a call that does not change from one decode step to the next. Tensors are *operands*,
taken from the program in order; numbers are *slots*, taken from the program's slot list in order. Forms go over the
wire, so they are msgspec structs with a closed set of argument kinds: a form cannot name a function or carry code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec


class Operand(msgspec.Struct, frozen=True, tag="t"):
    """Argument of a form: the next tensor operand of the program."""


class SlotArg(msgspec.Struct, frozen=True, tag="s"):
    """Argument of a form: the next number (int or float) in the program's slot list."""


class ComplexSlot(msgspec.Struct, frozen=True, tag="c"):
    """Argument of a form: a complex number, whose real and imaginary part are the next two slots."""


class ScalarTensor(msgspec.Struct, frozen=True, tag="k"):
    """Argument of a form: a 0-dim CPU tensor made from the next slot, or from two slots if `dtype` is complex."""

    dtype: str


class Constant(msgspec.Struct, frozen=True, tag="b"):
    """Argument of a form: None, a bool or a string that is passed to the op unchanged."""

    value: bool | str | None


class Enumerated(msgspec.Struct, frozen=True, tag="e"):
    """Argument of a form: a dtype, layout or memory format, by its name in `torch`."""

    kind: Literal["dtype", "layout", "memory_format"]
    name: str


class SelfDevice(msgspec.Struct, frozen=True, tag="d"):
    """Argument of a form: the executor's own device, or the CPU if `cpu` is True."""

    cpu: bool = False


class SessionGenerator(msgspec.Struct, frozen=True, tag="g"):
    """Argument of a form: the session's random generator on the executor's device."""


class ListArg(msgspec.Struct, frozen=True, tag="l"):
    """Argument of a form: a list of arguments."""

    items: tuple[Argument, ...]


Argument = (
    Operand | SlotArg | ComplexSlot | ScalarTensor | Constant | Enumerated | SelfDevice | SessionGenerator | ListArg
)


class Form(msgspec.Struct, frozen=True):
    """An op call without its operands and numbers.

    Attributes:
        op: overload name, such as `aten::add.Tensor`.
        args: positional arguments.
        kwargs: keyword arguments, in the order in which they take operands and slots.
        results: `new` or `none` for each result. `new`: the call creates a value. `none`: the result is undefined, or
            is an operand that the op wrote in place.
        sequence: True if the op returns a list or tuple of results.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    results: tuple[Literal["new", "none"], ...]
    sequence: bool

    def arguments(self) -> Sequence[Argument]:
        """Every argument that is not a list, in the order of operands and slots."""
        arguments: list[Argument] = []
        _gather((*self.args, *[argument for _, argument in self.kwargs]), arguments)
        return arguments

    @property
    def operand_count(self) -> int:
        """Number of tensors that a call consumes."""
        return len([a for a in self.arguments() if type(a) is Operand])

    @property
    def slot_count(self) -> int:
        """Number of slots that a call consumes."""
        return sum([slots_taken(a) for a in self.arguments() if type(a) is not Operand])

    @property
    def new_count(self) -> int:
        """Number of values that a call creates."""
        return self.results.count("new")


def _gather(arguments: Iterable[Argument], found: list[Argument]) -> None:
    for argument in arguments:
        if type(argument) is ListArg:
            _gather(argument.items, found)
        else:
            found.append(argument)


def slots_taken(argument: Argument) -> int:
    """Return the number of slots that a leaf argument consumes."""
    if isinstance(argument, SlotArg):
        return 1
    if isinstance(argument, ComplexSlot):
        return 2
    if isinstance(argument, ScalarTensor):
        return 2 if argument.dtype.startswith("complex") else 1
    return 0
