"""Liveness analysis of a template before it runs: the steps at which each value is used and released."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import attrs

from djinn_server.running.template_compiler import CompiledTemplate

NEVER: Final = 1 << 62  # later than any use


@attrs.frozen(eq=False)
class Lifetimes:
    """Lifetimes of the values of a template, by position in the environment.

    Attributes:
        steps: number of steps of the template.
        first_input: position of the first input.
        uses: the steps that use the value, in order.
        released: the last step that needs the value; surviving values are absent.
        outputs: number of the output, for output values.
        made_by: the step that makes the value; inputs are absent.
    """

    steps: int
    first_input: int
    uses: dict[int, list[int]]
    released: dict[int, int]
    outputs: dict[int, int]
    made_by: dict[int, int]

    def next_use(self, place: int, step: int) -> int:
        """Return the first step after `step` that uses the value, or NEVER."""
        found = self.uses.get(place)
        if not found:
            return NEVER
        at = bisect_right(found, step)
        return found[at] if at < len(found) else NEVER

    def last_use(self, place: int, step: int) -> int:
        """Return the last step up to `step` that made or used the value; -1 if there is none."""
        found = self.uses.get(place, ())
        at = bisect_right(found, step)
        return found[at - 1] if at else self.made_by.get(place, -1)


def lifetimes_of(template: CompiledTemplate) -> Lifetimes:
    """Return the lifetimes of a template's values."""
    uses: dict[int, list[int]] = {}
    released: dict[int, int] = {}
    made_by: dict[int, int] = {}
    for index, step in enumerate(template.steps):
        for place in dict.fromkeys(step.reads):
            uses.setdefault(place, []).append(index)
        for _, place in step.makes:
            made_by[place] = index
        for place in step.release:
            released[place] = index
    return Lifetimes(
        len(template.steps),
        len(template.constants) + template.slots,
        uses,
        released,
        {place: number for number, place in enumerate(template.outputs)},
        made_by,
    )
