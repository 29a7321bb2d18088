"""History of the uses of a session's storages: the last use, and the next use predicted from earlier programs.

The clock is the number of steps (ops) that programs have run on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from djinn_core.ir.handles import storage_of
from djinn_core.system.lru import LruCache
from djinn_server.memory.lifetimes import NEVER, Lifetimes

Identity = int | tuple[bytes, int]  # an upload's storage, or a template and the number of its output
PAST_RUNS: Final = 256
GAPS_LIMIT: Final = 1 << 16
UNSEEN: Final = 10_000  # predicted steps until the next use of a storage that no program has used twice


@attrs.frozen
class PastRun:
    """A run of a template.

    Attributes:
        digest: digest of the template.
        lifetimes: lifetimes of the template's values.
        start_clock: clock at the start of the run.
        inputs, outputs: handles of the inputs and outputs.
    """

    digest: bytes
    lifetimes: Lifetimes
    start_clock: int
    inputs: Sequence[int]
    outputs: Sequence[int]


@attrs.define
class _Use:
    """Uses of one storage. Times are values of the clock.

    Attributes:
        identity: identifies the storage across runs.
        digest: digest of the template that used the storage last; empty if none did.
        last: last use in the newest run that uses the storage.
        next: predicted next use after `last`.
        before: last use before that run.
    """

    identity: Identity
    digest: bytes
    last: int
    next: int
    before: int


class UseHistory:
    """Predicts the next use of a storage.

    The prediction: after a template's last use of a storage, the next use follows after as many steps as the last time.
    Results are new storages in each run, so each output of a template counts as one storage.
    """

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}  # by storage
        # Steps from a template's last use of a storage to the next use.
        self._gaps: LruCache[tuple[Identity, bytes], int] = LruCache(GAPS_LIMIT)
        self._runs: deque[PastRun] = deque(maxlen=PAST_RUNS)  # runs whose uses were not added yet
        self._oldest_clock = 0  # last use of storages without a recorded use

    def add(self, run: PastRun) -> None:
        """Add a run that begins. `catch_up` adds its uses, because most runs stay far below the limit and need none."""
        if len(self._runs) == PAST_RUNS:
            self._oldest_clock = self._runs[0].start_clock
        self._runs.append(run)

    def last(self, handles: Iterable[int], now: int) -> int:
        """Return the clock of the last use of a storage up to `now`. A new upload counts as used now.

        `handles`: views of the storage.
        """
        uses = [self._use_of(storage_of(handle), now) for handle in handles]
        return max([use.last if use.last <= now else use.before for use in uses], default=now)

    def next(self, handles: Iterable[int], now: int) -> int | None:
        """Return the predicted clock of the next use of a storage.

        Return None if all predicted uses are before `now`. `handles`: views of the storage.
        """
        uses = [self._use_of(storage_of(handle), now) for handle in handles]
        return min([use.next for use in uses if use.next >= now], default=None)

    def _use_of(self, storage: int, now: int) -> _Use:
        use = self._uses.get(storage)
        if use is None:
            last = self._oldest_clock or now
            use = self._uses[storage] = _Use(storage, b"", last, last + UNSEEN, last)
        return use

    def catch_up(self, alive: Iterable[int]) -> None:
        """Add the uses of the added runs, and drop those of freed storages. `alive`: handles of the session's values."""
        while self._runs:
            self._add_uses(self._runs.popleft())
        handles = list(alive)
        if len(self._uses) > 2 * (len(handles) + PAST_RUNS):
            storages = {storage_of(handle) for handle in handles}
            self._uses = {storage: use for storage, use in self._uses.items() if storage in storages}

    def _add_uses(self, run: PastRun) -> None:
        lifetimes, start_clock, digest = run.lifetimes, run.start_clock, run.digest
        for number, handle in enumerate(run.inputs):
            place = lifetimes.first_input + number
            if (first := lifetimes.next_use(place, -1)) < NEVER:
                last = lifetimes.last_use(place, lifetimes.steps)
                self._record_use(storage_of(handle), digest, start_clock, first, last)
        for place, number in lifetimes.outputs.items():
            storage, made_at = (
                storage_of(run.outputs[number]),
                start_clock + max(0, lifetimes.last_use(place, lifetimes.steps)),
            )
            if storage not in self._uses:
                use = self._uses[storage] = _Use((digest, number), digest, made_at, 0, start_clock)
                self._predict(use)

    def _record_use(self, storage: int, digest: bytes, start_clock: int, first: int, last: int) -> None:
        first, last = start_clock + first, start_clock + last
        use = self._uses.get(storage)
        if use is None:
            use = self._uses[storage] = _Use(storage, digest, last, 0, start_clock)
        elif use.digest:
            self._gaps.store((use.identity, use.digest), first - use.last)
        use.digest, use.before, use.last = digest, use.last, max(use.last, last)
        self._predict(use)

    def _predict(self, use: _Use) -> None:
        use.next = use.last + self._gaps.get((use.identity, use.digest), UNSEEN)
