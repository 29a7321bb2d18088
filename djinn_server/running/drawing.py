"""Random numbers that calls of a form draw. Attention without dropout draws none, although its op may."""

from __future__ import annotations

from typing import Final

import torch

from djinn_core import torch_private
from djinn_core.ir.form import Form, SlotArg, slots_taken
from djinn_core.ir.operators import OWN_OPERATORS, resolve

ALWAYS: Final = -1  # in place of a slot


def chance_of(form: Form) -> int | None:
    """Return the position of the slot that enables random draws if nonzero; `ALWAYS`: it always draws; None: never."""
    if form.op in OWN_OPERATORS:
        return ALWAYS
    overload = resolve(form.op)
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return None
    names = [argument.name for argument in torch_private.schema_of(overload).arguments]
    if "dropout_p" not in names:
        return ALWAYS
    taken = 0
    for name, argument in (*zip(names, form.args, strict=False), *form.kwargs):
        if name == "dropout_p":
            return taken if isinstance(argument, SlotArg) else ALWAYS
        taken += slots_taken(argument)
    return None  # dropout defaults to 0
