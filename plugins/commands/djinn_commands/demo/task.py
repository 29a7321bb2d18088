"""Interface of a demonstration: the same work on two devices, and the comparison of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

# Called with the number of completed steps and of all steps.
Advance = Callable[[int, int], None]


@attrs.frozen
class Verdict:
    """Comparison of two results: whether they agree, and the difference in words."""

    equal: bool
    detail: str


def difference_text(difference: float) -> str:
    """Return the difference between two results as text."""
    return "bitwise" if difference == 0 else f"within {difference:.0e}"


class Task(Protocol):
    """Interface of a demonstration.

    Attributes:
        name: its name in `djinn demo --only`.
        title: name of the model, in two or three words.
    """

    name: str
    title: str

    def move(self, device: str) -> None:
        """Move a new copy of the model to `device`. Its time is the upload time."""

    def run(self, device: str, advance: Advance) -> Any:
        """Do the work on `device`. Return the result on the CPU. Each call gives the same result."""

    def compare(self, local: Any, remote: Any) -> Verdict:
        """Return the comparison of both results."""

    def highlights(self, remote: Any) -> list[str]:
        """Return lines of at most 64 characters that show the remote result."""
