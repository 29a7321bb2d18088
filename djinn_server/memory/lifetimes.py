"""Lifetimes of the values of a template: the steps at which each value is computed, used and released.

They are found before the template runs.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import attrs

from djinn_server.running.template_compiler import CompiledTemplate

NEVER: Final = 1 << 62  # later than any use


@attrs.frozen(eq=False)
class Lifetimes:
    """Lifetimes of the values of a template, by place (index in the environment of a run).

    Attributes:
        steps: number of steps of the template.
        first_input: place of the first input.
        uses: numbers of the steps that use each value, in order.
        released_at: number of the last step that needs each value, without values that survive the run.
        outputs: number of the output for each value that is an output.
        made_by: number of the step that computes each value, without inputs.
    """

    steps: int
    first_input: int
    uses: dict[int, list[int]]
    released_at: dict[int, int]
    outputs: dict[int, int]
    made_by: dict[int, int]

    def next_use(self, place: int, step: int) -> int:
        """Return the number of the first step after `step` that uses the value at `place`, or `NEVER`."""
        uses = self.uses.get(place)
        if not uses:
            return NEVER
        at = bisect_right(uses, step)
        return uses[at] if at < len(uses) else NEVER

    def last_use(self, place: int, step: int) -> int:
        """Return the number of the last step up to `step` (inclusive) that computed or used the value at `place`, or -1."""
        uses = self.uses.get(place, ())
        at = bisect_right(uses, step)
        return uses[at - 1] if at else self.made_by.get(place, -1)


def lifetimes_of(template: CompiledTemplate) -> Lifetimes:
    """Return the lifetimes of a template's values."""
    uses: dict[int, list[int]] = {}
    released_at: dict[int, int] = {}
    made_by: dict[int, int] = {}
    for index, step in enumerate(template.steps):
        for place in dict.fromkeys(step.reads):
            uses.setdefault(place, []).append(index)
        for _, place in step.makes:
            made_by[place] = index
        for place in step.release:
            released_at[place] = index
    return Lifetimes(
        len(template.steps),
        len(template.constants) + template.slots,
        uses,
        released_at,
        {place: number for number, place in enumerate(template.outputs)},
        made_by,
    )
