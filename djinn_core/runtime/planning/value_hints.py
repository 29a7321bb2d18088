"""Hints to executors: the kinds of a template's values, and what its plan decided, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType
from typing import Final

from djinn_core.ir.profile import DataResidency, WorkloadProfile
from djinn_core.ir.program import Program
from djinn_core.ir.result import PipelineResult
from djinn_core.printable import printable
from djinn_core.runtime.sending.template import Prepared
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


_LINE: Final = 200  # characters of a decision


def hints_for(
    prepared: Prepared, program: Program, profile: WorkloadProfile, result: PipelineResult | None = None
) -> ValueHints:
    """Hints for the inputs and outputs of a template; what nothing is known of is an activation."""
    values = list(dict.fromkeys(program.operands))

    def letter(position: int) -> str:
        kind = profile.residency.get(values[position]) if position < len(values) else None
        return _LETTERS[kind or DataResidency.EPHEMERAL_ACTIVATION]

    def letters(positions: tuple[int, ...]) -> bytes:
        return "".join(map(letter, positions)).encode()

    decisions = tuple(islice(_decisions(len(program), result), limits.DECISIONS)) if result is not None else ()
    phase = profile.phase.value
    return ValueHints(prepared.digest, phase, letters(prepared.inputs), letters(prepared.outputs), decisions)


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
