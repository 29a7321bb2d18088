"""Working set of a session in bytes by kind: values that its programs read or made and that are still there, and temporaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.ir.values import storage_of
from djinn_core.server.memory.budgets import ACTIVATION, KINDS, counted_phase
from djinn_core.server.running.values import ValueTable

PROGRAMS_LIMIT: Final = 512


@attrs.define
class _Touched:
    """A storage that a program read or made: the last run that did, and the kind of its values."""

    run: int
    kind: str


class Usage:
    """The working set of a session, by phase.

    A step of a client may come as one program or as several, each of which reads a part of the weights and of the caches. So
    the working set of a run is every live value that was used since the same template ran the last time.
    """

    def __init__(self, values: ValueTable) -> None:
        self.bytes: Mapping[str, int] = {}  # by kind, of the last run
        self._values = values
        self._run = 0
        self._ran: dict[bytes, int] = {}  # by template its last run
        self._touched: dict[str, dict[int, _Touched]] = {}  # by phase and storage, the last used last
        self._since = 0
        self._before: Mapping[str, int] = {}

    def begin(self, phase: str, digest: bytes, inputs: Iterable[tuple[int, str]]) -> None:
        """A template is about to run, before anything is freed for it; `inputs` are handles with their kinds."""
        phase = counted_phase(phase)
        self._run += 1
        self._since = self._ran.pop(digest, 0)
        self._ran[digest] = self._run
        while len(self._ran) > PROGRAMS_LIMIT:
            del self._ran[next(iter(self._ran))]
        self._touch(phase, inputs)
        self._before = self._held(phase)

    def end(self, phase: str, outputs: Sequence[tuple[int, str]], peak: int) -> Mapping[str, int]:
        """It has run, and took at most `peak` bytes of new memory at once; bytes by kind that it used."""
        phase = counted_phase(phase)
        new = self._touch(phase, outputs)
        after, made = self._held(phase), Counter[str]()
        for storage, kind in new.items():
            made[kind] += self._values.bytes_of(storage)
        used = {kind: max(self._before.get(kind, 0), after[kind]) for kind in KINDS}
        lasting = made.total() - made[ACTIVATION]
        used[ACTIVATION] = self._before.get(ACTIVATION, 0) + max(made[ACTIVATION], peak - lasting)
        self.bytes = used
        return used

    def _touch(self, phase: str, values: Iterable[tuple[int, str]]) -> dict[int, str]:
        """Note that the run uses these values; the storages that no run of this phase has used before, with their kinds."""
        touched, new = self._touched.setdefault(phase, {}), {}
        for handle, kind in values:
            storage = storage_of(handle)
            known = touched.pop(storage, None)
            kinds = [kind] if known is None else [kind, known.kind]
            kept = max(kinds, key=KINDS.index)  # of values that share memory, the one that is kept longest counts
            touched[storage] = _Touched(self._run, kept)
            if known is None or storage in new:
                new[storage] = kept
        return new

    def _held(self, phase: str) -> Counter[str]:
        """Bytes by kind of what was used since the template ran before; what is gone is forgotten."""
        found: Counter[str] = Counter()
        touched, gone = self._touched[phase], []
        for storage, known in reversed(touched.items()):
            if known.run <= self._since:
                break
            if nbytes := self._values.bytes_of(storage):
                found[known.kind] += nbytes
            else:
                gone.append(storage)
        for storage in gone:
            del touched[storage]
        if len(touched) > PROGRAMS_LIMIT + 2 * len(self._values):
            self._touched[phase] = {s: known for s, known in touched.items() if self._values.bytes_of(s)}
        return found
