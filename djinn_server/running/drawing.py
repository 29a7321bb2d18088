"""Find the ops of a template that draw random numbers.

Some ops draw only if an argument is nonzero, such as attention with `dropout_p`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.ir.form import Form, SlotArg, slots_taken
from djinn_core.ir.operators import OWN_OPERATORS, resolve
from djinn_server.running.template_compiler import CompiledTemplate

ALWAYS: Final = -1  # instead of a slot: the op draws in every run


@attrs.frozen
class Draws:
    """Instructions of a template that draw random numbers.

    Attributes:
        conditions: pairs of an instruction's number and a slot, in order. The instruction draws if the slot's number is
            nonzero. With `ALWAYS` instead of a slot, it draws in every run.
    """

    conditions: tuple[tuple[int, int], ...]

    def first_draw(self, slots: Sequence[int | float]) -> int | None:
        """Return the number of the first instruction that draws in a run with these slots, or None."""
        return next((at for at, condition in self.conditions if condition == ALWAYS or slots[condition] != 0), None)


def draw_condition(form: Form) -> int | None:
    """Return the position of the op's slot that enables random draws if its number is nonzero.

    The position counts the slots of this op call. Return `ALWAYS` if the op always draws, None if it never does.
    """
    if form.op in OWN_OPERATORS:
        return ALWAYS
    overload = resolve(form.op)
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return None
    names = [argument.name for argument in torch_private.schema_of(overload).arguments]
    if "dropout_p" not in names:
        return ALWAYS
    slots_before = 0
    for name, argument in (*zip(names, form.args, strict=False), *form.kwargs):
        if name == "dropout_p":
            return slots_before if isinstance(argument, SlotArg) else ALWAYS
        slots_before += slots_taken(argument)
    return None  # dropout defaults to 0


def draws_of(template: CompiledTemplate) -> Draws:
    """Return the random draws of a template."""
    conditions, slots_before = list[tuple[int, int]](), 0
    for at, code in enumerate(template.source.code if template.random else ()):
        form = template.source.forms[code]
        condition = draw_condition(form)
        if condition is not None:
            conditions.append((at, condition if condition == ALWAYS else slots_before + condition))
        slots_before += form.slot_count
    return Draws(tuple(conditions))
