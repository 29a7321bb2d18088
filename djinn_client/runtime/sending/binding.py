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


class Bindings(msgspec.Struct, frozen=True):
    """Bindings of one run of a template.

    Attributes:
        bits: contents of the slots.
        kinds: types of the slots.
        inputs: handles of the template's inputs.
        values: handles of the program's values, in order of first use.
        written: positions, in `values`, of the values that the template writes.
    """

    bits: Words
    kinds: Kinds
    inputs: Words
    values: Words
    written: tuple[int, ...]

    def initial(self, workload: Workload | None) -> InitialBindings:
        """Return all bindings, for an executor that has not run the template before."""
        handles = [int(self.values[i]) for i in self.written]
        return InitialBindings(
            decoded_slots(self.bits, self.kinds), pack_handles(self.inputs.tolist()), pack_handles(handles), workload
        )

    def input_changes(self, before: Bindings) -> InputChanges:
        """Return the inputs that differ from the run `before`."""
        if self.inputs.tobytes() == before.inputs.tobytes():  # takes a fifth of the time if few differ
            return ()
        (positions,) = (self.inputs != before.inputs).nonzero()
        return pack_inputs(positions.tolist(), self.inputs[positions].tolist())

    def slot_changes(self, before: Bindings) -> SlotChanges:
        """Return the slots that differ from the run `before`."""
        same_kinds = self.kinds.tobytes() == before.kinds.tobytes()
        if same_kinds and self.bits.tobytes() == before.bits.tobytes():
            return ()
        differ = self.bits != before.bits
        if not same_kinds:
            differ |= self.kinds != before.kinds
        (positions,) = differ.nonzero()
        return pack_slots(positions.tolist(), decoded_slots(self.bits[positions], self.kinds[positions]))


def bind(prepared: PreparedTemplate, program: Program, values: Words) -> Bindings:
    """Return the bindings of a template for a run of `program`. `values`: as in `Bindings`."""
    bits, kinds = program.scalars
    if prepared.rewrite is not None and prepared.rewrite.constants:
        constant_bits, constant_kinds = slot_arrays(prepared.rewrite.constants)
        bits, kinds = np.concatenate((bits, constant_bits)), np.concatenate((kinds, constant_kinds))
    if prepared.slots is not None:
        bits, kinds = bits[prepared.slots], kinds[prepared.slots]
    return Bindings(bits, kinds, values[prepared.inputs], values, prepared.written)


def open_claims(prepared: PreparedTemplate, program: Program) -> tuple[Claim, ...]:
    """Return the predicted layouts of results that no executor has confirmed yet for their signature."""
    claims: list[Claim] = []
    unconfirmed: list[int] = []
    for instruction in prepared.claims:
        call = prepared.call(instruction, program)
        instruction_claims = [] if call.signature.layout_trusted else _claims_of(instruction, call)
        if instruction_claims:
            claims += instruction_claims
            unconfirmed.append(instruction)
    prepared.claims = tuple(unconfirmed)
    return tuple(claims)


def _claims_of(instruction: int, call: Call) -> list[Claim]:
    return [
        Claim(instruction, index, meta.shape, meta.stride, dtype_name(meta.dtype))
        for index, (meta, alias, same, _) in enumerate(call.outcome)
        if meta is not None and alias < 0 and same < 0
    ]


def confirm_claims(prepared: PreparedTemplate, program: Program, claimed: Sequence[int], completed: Completed) -> None:
    """Mark the predicted layouts that a reply confirms, and learn the actual layouts of other results.

    `claimed`: instructions of the template whose layouts the submission claimed.
    """
    calls = [prepared.call(instruction, program) for instruction in range(len(prepared.nodes))]
    for mismatch in completed.layout_mismatches:
        port.interception.learn(calls[mismatch.instruction], mismatch.result, mismatch.stride)
    unconfirmed = {f.instruction for f in completed.failures} | {r.instruction for r in completed.layout_mismatches}
    for instruction in claimed:
        if instruction not in unconfirmed:
            calls[instruction].signature.layout_trusted = True


class PendingSubmission(msgspec.Struct, frozen=True):
    """A pending submission, with the data to handle its reply.

    Attributes:
        program: the recorded program.
        prepared: the template that runs, or None if none runs.
        bindings: the run's bindings, or None if no template runs.
        claimed_instructions: instructions whose layouts the submission claims.
        is_awaited: True if a caller waits for the results.
        synchronize: as in `Submission`.
        end_offset: end of the submission's frame in the connection's byte stream.
        thread: identity of the sending thread.
    """

    program: Program
    prepared: PreparedTemplate | None
    bindings: Bindings | None
    claimed_instructions: tuple[int, ...]
    is_awaited: bool
    synchronize: bool
    end_offset: int
    thread: int
