"""Exponential back-off: each pause between attempts is twice as long as the previous one, up to a limit.

Callers do the waiting, because different things end a wait: a signal, a closing event, a condition.
"""

from __future__ import annotations

import random


class Backoff:
    """Exponential pauses between attempts, from `first` to `longest` seconds. Not thread-safe."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def pause(self) -> float:
        """Return the pause before the next attempt in seconds: twice the previous pause, at most `longest`."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def random_pause(self) -> float:
        """Return a randomized `pause`, so that many refused clients do not retry at the same time."""
        return self.pause() * random.uniform(0.5, 1.5)  # noqa: S311 - not for secrecy

    def reset(self) -> None:
        """Reset to the first pause, because an attempt has succeeded."""
        self._next = self._first
