"""Uses of a session's values: the last ones, and those by its next programs, predicted from the order of its past programs.

In predictions, values are known by their role, since their handles are new each time: an uploaded value by its handle, a result by its program
and the number of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.ir.handles import storage_of
from djinn_core.system.lru import LruCache
from djinn_server.memory.lifetimes import NEVER, Lifetimes
from djinn_server.running.values import ValueTable

Role = int | tuple[bytes, int]
PROGRAMS_LIMIT: Final = 512
AHEAD_STEPS: Final = 20_000  # how far is looked
AHEAD_PROGRAMS: Final = 32


class LastUses:
    """The step at which each storage of a session was made or used last, counted on its device."""

    def __init__(self, values: ValueTable) -> None:
        self._values = values
        self._steps: dict[int, int] = {}

    def note(self, lifetimes: Lifetimes, began: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """A program has run that began at step `began`."""
        first, steps = lifetimes.first_input, self._steps
        for number, handle in enumerate(inputs):
            steps[storage_of(handle)] = began + max(0, lifetimes.last_use(first + number, lifetimes.steps))
        for place, number in lifetimes.outputs.items():
            steps[storage_of(outputs[number])] = began + max(0, lifetimes.last_use(place, lifetimes.steps))
        if len(steps) > 4 * PROGRAMS_LIMIT + 2 * len(self._values):
            self._steps = {storage: step for storage, step in steps.items() if self._values.bytes_of(storage)}

    def forgot(self, step: int) -> None:
        """Note that uses before a step are not known any more: it counts as the last use of what no program is known to have used."""
        for handle in list(self._values.table):
            self._steps.setdefault(storage_of(handle), step)

    def last(self, handles: Iterable[int], now: int) -> int:
        """The last use of values that share memory; for those that no program has used, when this was asked first."""
        return max([self._steps.setdefault(storage_of(handle), now) for handle in handles], default=now)


@attrs.define(eq=False)
class _PastProgram:
    """One program of a session: its steps, the steps at which it uses values, and the program that followed it last time."""

    steps: int
    uses: dict[Role, int] = attrs.field(factory=dict)
    following: bytes = b""


class NextUsePredictor:
    """Predicts the next uses of one session's values."""

    def __init__(self) -> None:
        self._roles: dict[int, Role] = {}
        self._seen: LruCache[bytes, _PastProgram] = LruCache(PROGRAMS_LIMIT)
        self._last = b""

    def begin(self, digest: bytes, lifetimes: Lifetimes, inputs: Sequence[int]) -> None:
        """A program begins to run."""
        if (before := self._seen.get(self._last)) is not None:
            before.following = digest
        seen = self._seen.get(digest) or _PastProgram(lifetimes.steps)
        first = lifetimes.first_input
        seen.uses = {self.role(handle): lifetimes.next_use(first + number, -1) for number, handle in enumerate(inputs)}
        self._seen.store(digest, seen)
        self._last = digest

    def end(self, digest: bytes, outputs: Sequence[int], alive: Callable[[int], bool]) -> None:
        """End the program, which made these values; `alive` tells which of them the session still has."""
        for number, handle in enumerate(outputs):
            self._roles[handle] = (digest, number)
        if len(self._roles) > 4 * PROGRAMS_LIMIT + 4 * len(outputs):
            self._roles = {handle: role for handle, role in self._roles.items() if alive(handle)}

    def role(self, handle: int) -> Role:
        """Role of a value."""
        return self._roles.get(handle, handle)

    def distances(self) -> Mapping[Role, int]:
        """Steps from the end of the last program that began to the next use of each value, as far as that can be predicted."""
        found: dict[Role, int] = {}
        steps, programs = 0, 0
        digest = self._seen[self._last].following if self._last in self._seen else b""
        while (seen := self._seen.get(digest)) is not None and steps < AHEAD_STEPS and programs < AHEAD_PROGRAMS:
            for role, use in seen.uses.items():
                if use < NEVER:
                    found.setdefault(role, steps + use)
            steps, programs, digest = steps + seen.steps, programs + 1, seen.following
        return found
