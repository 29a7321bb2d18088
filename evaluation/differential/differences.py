"""Compare the facts of one program on two devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from evaluation.differential.known_differences import known_difference
from evaluation.differential.program_runs import REMOTE, Facts, Names, Raised, Value, forget, run
from evaluation.differential.shrinking import shrunk

ABSENT = "(nothing)"


@attrs.frozen
class Difference:
    """A property of a tensor that differs after a statement.

    Attributes:
        statement: index of the statement. The number of statements stands for the end of the program.
        place: name of the tensor. property: name of the property.
        here, there: the property on the CPU and on the remote device.
        source: text of the statement.
    """

    statement: int
    place: str
    property: str
    here: Any
    there: Any
    source: str = ""

    def __str__(self) -> str:
        return f"{self.place or 'statement'}: {self.property}: CPU {_short(self.here)}, remote {_short(self.there)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 300 else text[:300] + "..."


# returns True if unequal elements are close enough
Close = Callable[[torch.Tensor, torch.Tensor], bool]


def differences(
    statements: Sequence[str], here: Sequence[Facts], there: Sequence[Facts], close: Close | None = None
) -> Iterator[Difference]:
    """Yield differences of the remote device from the CPU, the earliest first. Known differences are left out."""
    before: dict[tuple[str, str], tuple[Any, Any]] = {}  # the last difference, which persists
    offsets: set[int] = set()  # known version offsets of storages; views share those of their base
    for number, (want, actual) in enumerate(zip(here, there, strict=True)):
        source = statements[number] if number < len(statements) else ""
        differing: dict[tuple[str, str], tuple[Any, Any]] = {}
        if want == actual:  # the usual case
            before = differing
            continue
        for key in [*want, *(k for k in actual if k not in want)]:
            one, other = want.get(key, ABSENT), actual.get(key, ABSENT)
            if one == other or (
                close and isinstance(one, Value) and isinstance(other, Value) and close(one.tensor, other.tensor)
            ):
                continue
            differing[key] = (one, other)
            is_version = key[1] == "version" and isinstance(one, int) and isinstance(other, int)
            if (before.get(key) == (one, other) and key[0]) or (is_version and one - other in offsets):
                continue
            name = (
                "error text"
                if isinstance(one, Raised) and isinstance(other, Raised) and one.kind == other.kind
                else key[1]
            )
            result = Difference(number, key[0], name, one, other, source)
            entry = known_difference(
                result, "error" in {name for place, name in want.keys() & actual.keys() if not place}
            )
            if entry is None:
                yield result
                continue
            if entry.ends:
                return
            if is_version:
                offsets.add(one - other)
        before = differing


@attrs.frozen
class FirstDifference:
    """First difference of a program. `run`: 1 for the first remote run, whose calls are new, 2 for the second."""

    run: int
    difference: Difference
    statements: tuple[str, ...]

    def __str__(self) -> str:
        source = self.difference.source or "at the end"
        return f"run {self.run}, statement {self.difference.statement}, {source}\n  {self.difference}"


def first_difference(
    statements: Sequence[str],
    expected: Sequence[Facts] | None = None,
    extra: Names | None = None,
    close: Close | None = None,
) -> FirstDifference | None:
    """Run a program on the CPU and twice on the remote device, and return the first difference, or None.

    `expected`: facts from an earlier run on the CPU. `extra`: further names of the program.
    """
    here = run(statements, "cpu", extra) if expected is None else expected
    forget()
    for number in (1, 2):
        for difference in differences(statements, here, run(statements, REMOTE, extra), close):
            return FirstDifference(number, difference, tuple(statements))
    return None


def smallest(found: FirstDifference) -> FirstDifference:
    """Return the difference in the smallest program that shows it, or `found` if the difference does not repeat."""
    statements = found.statements[: found.difference.statement + 1]

    def differs(part: Sequence[str]) -> bool:
        again = first_difference(part)
        return again is not None and again.difference.property == found.difference.property

    if not differs(statements):
        return found
    return first_difference(shrunk(statements, differs)) or found
