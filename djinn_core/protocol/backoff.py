"""Exponential back-off: pauses between attempts, each twice as long as the one before, up to a limit.

Callers wait by themselves, since each wait is ended by something else: a signal, a closing event, a condition.
"""

from __future__ import annotations

import random


class Backoff:
    """Pauses from `first` to `longest` seconds; not locked."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def pause(self) -> float:
        """The pause before the next attempt, in seconds; the one after it is longer."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def jittered(self) -> float:
        """As `pause`, about so long: many clients that were refused together do not come back together."""
        return self.pause() * random.uniform(0.5, 1.5)  # noqa: S311 - not for secrecy

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first one again."""
        self._next = self._first
