"""Bindings of a template's run (handles and slots), and the predicted layouts of its results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from djinn_client.interception.runtime_interface import port
from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.program import Call, Program
from djinn_core.ir.slot_arrays import Kinds, Words, decoded_slots, slot_arrays
from djinn_core.wire.binding_delta import InputChanges, SlotChanges, pack_handles, pack_inputs, pack_slots
from djinn_core.wire.messages import Claim, Completed, InitialBindings, Workload
from djinn_core.wire.tensors import dtype_name


class Bound(msgspec.Struct, frozen=True):
    """Bindings of one run of a template.

    Attributes:
        bits: contents of the slots.
        kinds: types of the slots.
        inputs: handles of the inputs.
        values: values of the program.
        written: positions of the written values.
    """

    bits: Words
    kinds: Kinds
    inputs: Words
    values: Words
    written: tuple[int, ...]

    def as_first(self, workload: Workload | None) -> InitialBindings:
        """Return all bindings, for an executor that has not run the template before."""
        handles = [int(self.values[i]) for i in self.written]
        return InitialBindings(
            decoded_slots(self.bits, self.kinds), pack_handles(self.inputs.tolist()), pack_handles(handles), workload
        )

    def input_changes(self, before: Bound) -> InputChanges:
        """Return the inputs that differ from another run."""
        if self.inputs.tobytes() == before.inputs.tobytes():  # takes a fifth of the time if few differ
            return ()
        (at,) = (self.inputs != before.inputs).nonzero()
        return pack_inputs(at.tolist(), self.inputs[at].tolist())

    def slot_changes(self, before: Bound) -> SlotChanges:
        """Return the slots that differ from another run."""
        same_kinds = self.kinds.tobytes() == before.kinds.tobytes()
        if same_kinds and self.bits.tobytes() == before.bits.tobytes():
            return ()
        differ = self.bits != before.bits
        if not same_kinds:
            differ |= self.kinds != before.kinds
        (at,) = differ.nonzero()
        return pack_slots(at.tolist(), decoded_slots(self.bits[at], self.kinds[at]))


def bind(prepared: PreparedTemplate, program: Program, values: Words) -> Bound:
    """Return the bindings of a template for a program with these `values`, by first appearance."""
    bits, kinds = program.scalars
    if prepared.rewrite is not None and prepared.rewrite.constants:
        constant_bits, constant_kinds = slot_arrays(prepared.rewrite.constants)
        bits, kinds = np.concatenate((bits, constant_bits)), np.concatenate((kinds, constant_kinds))
    if prepared.slots is not None:
        bits, kinds = bits[prepared.slots], kinds[prepared.slots]
    return Bound(bits, kinds, values[prepared.inputs], values, prepared.written)


def open_claims(prepared: PreparedTemplate, program: Program) -> tuple[Claim, ...]:
    """Return the predicted layouts of results that no executor has confirmed for their signature."""
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
    """Mark the predicted layouts that the executor has confirmed. Learn the actual layouts of the other results."""
    calls = [prepared.call(instruction, program) for instruction in range(len(prepared.nodes))]
    for mismatch in completed.layout_mismatches:
        port.interception.learn(calls[mismatch.instruction], mismatch.result, mismatch.stride)
    doubtful = {f.instruction for f in completed.failures} | {r.instruction for r in completed.layout_mismatches}
    for instruction in claimed:
        if instruction not in doubtful:
            calls[instruction].signature.layout_trusted = True


class PendingSubmission(msgspec.Struct, frozen=True):
    """A pending submission, with the data to handle its reply."""

    program: Program
    prepared: PreparedTemplate | None
    bound: Bound | None
    claimed: tuple[int, ...]
    answered: bool  # True if a caller waits for the results
    synchronize: bool
    position: int  # end of its frame in the connection's byte stream
    thread: int  # identity of the sending thread
