"""The function `djinn.example`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import djinn


@contextmanager
def example() -> Iterator[Callable[[], int]]:
    """Count what is recorded in the block: gives a function that returns the number of ops, without running any."""
    with djinn.capture() as captured:
        yield lambda: len(captured.program)
