"""Bindings of a template's run (handles and slots), and the predicted layouts of its results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from djinn_client.interception.dispatch import learn_layout
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.program import Call, Program, Slot
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import Claim, Completed, InitialBindings
from djinn_core.wire.tensors import dtype_name


class Bound(msgspec.Struct, frozen=True):
    """Bindings of one run of a template.

    Attributes:
        written: positions, among the program's `values`, of those that are written into.
    """

    slots: tuple[Slot, ...]
    inputs: list[int]
    values: Sequence[int]
    written: tuple[int, ...]

    def as_first(self) -> InitialBindings:
        """All bindings, for an executor that has not run the template before."""
        written = [self.values[i] for i in self.written]
        return InitialBindings(self.slots, pack_handles(self.inputs), pack_handles(written))


def bind(prepared: PreparedTemplate, program: Program, values: Sequence[int]) -> Bound:
    """Bind a template to a program whose values, by first appearance, are `values`."""
    slots = program.slots
    if prepared.rewrite is not None:
        slots = (*slots, *prepared.rewrite.constants)
    if prepared.slots is not None:
        slots = tuple([slots[i] for i in prepared.slots])
    return Bound(slots, [*map(values.__getitem__, prepared.inputs)], values, prepared.written)


def open_claims(prepared: PreparedTemplate, program: Program) -> tuple[Claim, ...]:
    """Predicted layouts of results that no executor has confirmed for their signature."""
    claims: list[Claim] = []
    doubtful: list[int] = []
    for instruction in prepared.claims:
        call = prepared.call(instruction, program)
        made = [] if call.signature.layout_trusted else _claims_of(instruction, call)
        if made:
            claims += made
            doubtful.append(instruction)
    prepared.claims = tuple(doubtful)
    return tuple(claims)


def _claims_of(instruction: int, call: Call) -> list[Claim]:
    return [
        Claim(instruction, index, meta.shape, meta.stride, dtype_name(meta.dtype))
        for index, (meta, alias, same, _) in enumerate(call.outcome)
        if meta is not None and alias < 0 and same < 0
    ]


def settle_claims(prepared: PreparedTemplate, program: Program, claimed: Sequence[int], completed: Completed) -> None:
    """Note which predicted layouts the executor has confirmed, and learn from those that it has not."""
    calls = [prepared.call(instruction, program) for instruction in range(len(prepared.nodes))]
    for mismatch in completed.layout_mismatches:
        learn_layout(calls[mismatch.instruction], mismatch.result, mismatch.stride)
    doubtful = {f.instruction for f in completed.failures} | {r.instruction for r in completed.layout_mismatches}
    for instruction in claimed:
        if instruction not in doubtful:
            calls[instruction].signature.layout_trusted = True
