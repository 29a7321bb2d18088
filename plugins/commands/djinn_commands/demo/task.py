"""Demonstration task: the same work on two devices, and how its results are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

# Called with the number of steps done and the number of all steps.
Advance = Callable[[int, int], None]


@attrs.frozen
class Verdict:
    """Comparison of two results in words: agreement, and the difference."""

    equal: bool
    detail: str


def difference_text(difference: float) -> str:
    """Difference between two results."""
    return "bitwise" if difference == 0 else f"within {difference:.0e}"


class Task(Protocol):
    """One demonstration.

    Attributes:
        name: what `djinn demo --only` calls it.
        title: which model it is, in two or three words.
    """

    name: str
    title: str

    def move(self, device: str) -> None:
        """Bring a fresh copy of the model to `device`; what is measured as the upload."""

    def run(self, device: str, advance: Advance) -> Any:
        """Do the work on `device` and return its result on the CPU; the same each time."""

    def compare(self, local: Any, remote: Any) -> Verdict:
        """True if the results agree as they should."""

    def highlights(self, remote: Any) -> list[str]:
        """Lines of at most 64 characters that show what the remote run found, for a person to judge."""
