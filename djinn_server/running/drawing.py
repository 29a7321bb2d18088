"""Find the ops of a template that draw random numbers.

Attention without dropout draws none, although the op can.
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

ALWAYS: Final = -1  # in place of a slot


@attrs.frozen
class Draws:
    """Instructions of a template that draw random numbers.

    `calls`: for each instruction, the slot whose number must be nonzero for a draw, or `ALWAYS`.
    """

    calls: tuple[tuple[int, int], ...]

    def first(self, slots: Sequence[int | float]) -> int | None:
        """Return the first instruction that draws a random number in a run with these slots; None if none does."""
        return next((at for at, chance in self.calls if chance == ALWAYS or slots[chance] != 0), None)


def chance_of(form: Form) -> int | None:
    """Return the position of the slot that enables random draws of an op if its number is nonzero.

    Return `ALWAYS` if the op always draws, None if it never does.
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
    calls, slots_before = list[tuple[int, int]](), 0
    for at, code in enumerate(template.source.code if template.random else ()):
        form = template.source.forms[code]
        chance = chance_of(form)
        if chance is not None:
            calls.append((at, chance if chance == ALWAYS else slots_before + chance))
        slots_before += form.slot_count
    return Draws(tuple(calls))
