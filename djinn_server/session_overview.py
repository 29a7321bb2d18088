"""Overview of a session for `djinn status` and dashboards: phase, steps, memory by kind, and what its plans decided.

A run costs it two assignments; bytes by kind are counted when a report is asked for, of templates that ran since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import ExecutionPhase
from djinn_core.system.lru import LruCache
from djinn_core.wire.messages import ServingFigures, ValueHints
from djinn_server.running.values import ValueTable

HINTS_LIMIT: Final = 256  # templates
LETTERS_LIMIT: Final = 1 << 20
DECISIONS_LIMIT: Final = 4  # plans of which the decisions are shown
LINES_LIMIT: Final = 12  # of these together
_REMEMBERED: Final = 16  # templates of which the last run is known
# By the letters of `ValueHints`; values that no template has named are activations.
KINDS: Final = MappingProxyType({
    "w": "weights",
    "k": "caches",
    "o": "optimizer",
    "g": "gradients",
    "i": "inputs",
    "a": "activations",
})  # fmt: skip
_PHASES: Final = frozenset(phase.value for phase in ExecutionPhase)


@attrs.frozen
class SessionOverview:
    """Present facts about a session.

    Attributes:
        phase: the phase of its last program; empty if its client has not told.
        steps: runs of the template by which its steps are counted: decode steps, training steps.
        seconds: time that its programs took on the device.
        kinds: bytes of its values by kind, such as `weights`; empty if its client has not told.
        decisions: what its latest plans decided, and why, in the client's words.
        shared: bytes of its values that other sessions have as well.
        submissions: that it was sent. aside: bytes that are in host memory and on disk because it is idle.
        serving: its requests.
    """

    phase: str = ""
    steps: int = 0
    seconds: float = 0.0
    kinds: Mapping[str, int] = attrs.field(factory=dict)
    decisions: tuple[str, ...] = ()
    shared: int = 0
    submissions: int = 0
    aside: tuple[int, int] = (0, 0)
    serving: ServingFigures = attrs.field(factory=ServingFigures)


class SessionNotes:
    """Notes that a session takes about its runs; `overview` is for any thread, all else for the session's."""

    def __init__(self, values: ValueTable) -> None:
        self._values = values
        self._hints: LruCache[bytes, ValueHints] = LruCache(HINTS_LIMIT)
        self._letters = 0
        self._decided: LruCache[bytes, tuple[str, ...]] = LruCache(DECISIONS_LIMIT)
        self._ran: dict[bytes, tuple[Sequence[int], Sequence[int]]] = {}
        self._kinds: dict[int, str] = {}  # by storage
        self._last = self._marker = b""
        self._at: LruCache[bytes, int] = LruCache(_REMEMBERED)  # number of the last run of a template
        self._runs = 0
        self._steps = 0
        self._seconds = 0.0

    def learn(self, hints: ValueHints) -> None:
        """The client says what the values of a template are."""
        before = self._hints.pop(hints.digest, None)
        gone = [*self._hints.store(hints.digest, hints), *([before] if before is not None else [])]
        self._letters += _size(hints) - sum(map(_size, gone))
        while self._letters > LETTERS_LIMIT:
            self._letters -= _size(self._hints.pop(next(iter(self._hints))))
        if hints.decisions:
            self._decided.store(hints.digest, hints.decisions)

    def ran(self, digest: bytes, inputs: Sequence[int], outputs: Sequence[int], seconds: float) -> None:
        """A template has run, with these handles.

        Steps are runs of one template. It gives way to one that comes more than twice as often as it lately does.
        """
        ran = self._ran  # another thread may take it meanwhile
        if digest not in ran and len(ran) >= HINTS_LIMIT:  # no report was asked for
            ran.pop(next(iter(ran)))
        ran[digest] = (inputs, outputs)
        again = digest == self._last
        self._last = digest
        self._seconds += seconds
        self._runs += 1
        at = self._at
        if digest == self._marker:
            self._steps += 1
        elif digest in at and self._runs - at.get(self._marker, 0) > 2 * (self._runs - at[digest]):
            self._marker = digest
        if again and digest in at:
            at[digest] = self._runs  # the newest already
        else:
            at.store(digest, self._runs)

    def overview(self) -> SessionOverview:
        """Facts as of now."""
        ran, self._ran = self._ran, {}
        for digest, (inputs, outputs) in list(ran.items()):
            hints = self._hints.get(digest)
            if hints is not None:
                self._note(inputs, hints.inputs)
                self._note(outputs, hints.outputs)
        last = self._hints.get(self._last)
        phase = last.phase if last is not None and last.phase in _PHASES else ""
        decisions = [line for lines in reversed(list(self._decided.values())) for line in lines]
        told = tuple(dict.fromkeys(decisions))[:LINES_LIMIT]
        return SessionOverview(phase, self._steps, self._seconds, self._by_kind(), told)

    def _note(self, handles: Iterable[int], letters: bytes) -> None:
        for handle, letter in zip(handles, letters, strict=False):
            kind = KINDS.get(chr(letter))
            if kind is not None and (kind != KINDS["a"] or storage_of(handle) not in self._kinds):
                self._kinds[storage_of(handle)] = kind

    def _by_kind(self) -> dict[str, int]:
        """Bytes by kind; empty if the client plans nothing, because it tells no kinds then."""
        if not self._hints:
            return {}
        found: dict[str, int] = {}
        for storage, kind in list(self._kinds.items()):
            nbytes = self._values.bytes_of(storage)
            if nbytes:
                found[kind] = found.get(kind, 0) + nbytes
            else:
                self._kinds.pop(storage, None)
        rest = self._values.held - sum(found.values())
        if rest > 0:
            found[KINDS["a"]] = found.get(KINDS["a"], 0) + rest
        return found


def _size(hints: ValueHints) -> int:
    return len(hints.inputs) + len(hints.outputs)
