"""Eviction hints: the kinds of a template's values, for executors with a memory limit."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.runtime.sending.template import Prepared
from djinn_core.wire.messages import ValueHints

_LETTERS: Final = MappingProxyType({
    DataResidency.PERSISTENT_WEIGHT: "w",
    DataResidency.STATEFUL_KV_CACHE: "k",
    DataResidency.GRADIENT: "g",
    DataResidency.OPTIMIZER_STATE: "o",
    DataResidency.INPUT: "i",
    DataResidency.EPHEMERAL_ACTIVATION: "a",
})  # fmt: skip


def hints_for(prepared: Prepared, program: Program, profile: WorkloadProfile) -> ValueHints:
    """Hints for the inputs and outputs of a template; what nothing is known of is an activation."""
    values = list(dict.fromkeys(program.operands))

    def letter(position: int) -> str:
        kind = profile.residency.get(values[position]) if position < len(values) else None
        return _LETTERS[kind or DataResidency.EPHEMERAL_ACTIVATION]

    def letters(positions: tuple[int, ...]) -> bytes:
        return "".join(map(letter, positions)).encode()

    return ValueHints(prepared.digest, profile.phase.value, letters(prepared.inputs), letters(prepared.outputs))
