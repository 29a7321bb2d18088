"""Hints to executors: the kinds of a template's values, and what its plan decided, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Final

from djinn_client.runtime.sending.template import PreparedTemplate
from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.system.printable import printable
from djinn_core.wire import limits
from djinn_core.wire.messages import ValueHints

_LETTERS: Final = MappingProxyType({
    DataResidency.PERSISTENT_WEIGHT: "w",
    DataResidency.STATEFUL_KV_CACHE: "k",
    DataResidency.GRADIENT: "g",
    DataResidency.OPTIMIZER_STATE: "o",
    DataResidency.INPUT: "i",
    DataResidency.EPHEMERAL_ACTIVATION: "a",
})  # fmt: skip

_KINDS: Final = MappingProxyType({letter: kind for kind, letter in _LETTERS.items()})

_LINE: Final = 200  # characters of a decision


def hints_for(
    prepared: PreparedTemplate, program: Program, profile: WorkloadProfile, result: PipelineResult | None = None
) -> ValueHints:
    """Hints for the inputs and outputs of a template; what nothing is known of is an activation."""
    decisions = tuple(islice(_decisions(len(program), result), limits.DECISIONS)) if result is not None else ()
    return hints_from(prepared, profile.phase.value, letters_of(program, profile), decisions)


def letters_of(program: Program, profile: WorkloadProfile) -> str:
    """Letters for the kinds of a program's values, by first appearance; what nothing is known of is an activation."""
    kinds, activation = profile.residency, DataResidency.EPHEMERAL_ACTIVATION
    return "".join([_LETTERS[kinds.get(value) or activation] for value in dict.fromkeys(program.operands)])


def hints_from(prepared: PreparedTemplate, phase: str, letters: str, decisions: tuple[str, ...]) -> ValueHints:
    """Hints for a template of a program whose values have these letters."""

    def taken(positions: tuple[int, ...]) -> bytes:
        activation = _LETTERS[DataResidency.EPHEMERAL_ACTIVATION]
        return "".join([letters[p] if p < len(letters) else activation for p in positions]).encode()

    return ValueHints(prepared.digest, phase, taken(prepared.inputs), taken(prepared.outputs), decisions)


def kinds_from(program: Program, letters: str) -> dict[int, DataResidency]:
    """The kinds of a program's values that `letters_of` wrote down.

    Raises:
        KeyError: they are no such letters.
    """
    return {v: _KINDS[letter] for v, letter in zip(dict.fromkeys(program.operands), letters, strict=True)}


def _decisions(ops: int, result: PipelineResult) -> Iterator[str]:
    """Decisions of a plan and their reasons, a line each: placements first, then optimizations that were applied, then those that were not."""
    placed = result.placement.decisions if result.placement is not None else ()
    where = Counter((one.device, one.reason) for one in placed)
    for (device, reason), count in where.most_common(2):
        yield _line(f"{count} of {ops} ops on {device}: {reason}")
    outcomes = result.plan.results if result.plan is not None else ()
    for one in sorted(outcomes, key=lambda one: not one.applied):
        yield _line(f"{one.optimization} {'applied' if one.applied else 'left out'}: {one.reason}")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:_LINE]
