"""Interface of the demo's tasks: the same work on two devices, and the comparison of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs

# Called with the number of completed steps and the number of all steps.
Advance = Callable[[int, int], None]


@attrs.frozen
class Verdict:
    """Comparison of two results: True if they agree, and the difference in words."""

    equal: bool
    detail: str


def difference_text(difference: float) -> str:
    """Return a difference between two results as text, such as `within 1e-06`."""
    return "bitwise" if difference == 0 else f"within {difference:.0e}"


class Task(Protocol):
    """A program of the demo.

    Attributes:
        name: name of the task in `djinn demo --only`.
        title: name of the model, in two or three words.
    """

    name: str
    title: str

    def move(self, device: str) -> None:
        """Move a new copy of the model to `device`. The caller measures this call as the upload."""

    def run(self, device: str, advance: Advance) -> Any:
        """Do the work on `device` and return the result on the CPU. Repeated calls return equal results."""

    def compare(self, local: Any, remote: Any) -> Verdict:
        """Return the comparison of a local and a remote result."""

    def highlights(self, remote: Any) -> list[str]:
        """Return lines of at most 64 characters that show the remote result."""
