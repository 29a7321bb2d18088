"""Memory budgets by kind of value and by phase, and the working sets of sessions from which they are learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, ExecutionPhase
from djinn_core.system.lru import LruCache
from djinn_server.running.values import ValueTable

WEIGHT, CACHE, ACTIVATION, STATE = "wkao"
KINDS: Final = (ACTIVATION, STATE, WEIGHT, CACHE)  # of several in one storage the last one counts
NAMES: Final = MappingProxyType({WEIGHT: "weights", CACHE: "caches", ACTIVATION: "activations", STATE: "states"})
RESIDENCIES: Final = MappingProxyType({
    WEIGHT: DataResidency.PERSISTENT_WEIGHT,
    CACHE: DataResidency.STATEFUL_KV_CACHE,
    ACTIVATION: DataResidency.EPHEMERAL_ACTIVATION,
    STATE: DataResidency.OPTIMIZER_STATE,
})  # fmt: skip
# Others that clients tell apart, and what they count as: gradients and inputs come and go with a step.
_COUNTED: Final = MappingProxyType({"g": ACTIVATION, "i": ACTIVATION})
_TRAINING: Final = "training"
_PHASES: Final = frozenset(phase.value for phase in ExecutionPhase)
# Shares of the memory until runs were seen.
_ASSUMED: Final = MappingProxyType({
    "llm_prefill": {WEIGHT: 0.5, CACHE: 0.2, ACTIVATION: 0.3, STATE: 0.0},
    "llm_decode": {WEIGHT: 0.5, CACHE: 0.45, ACTIVATION: 0.05, STATE: 0.0},
    _TRAINING: {WEIGHT: 0.2, CACHE: 0.0, ACTIVATION: 0.5, STATE: 0.3},
    "": {WEIGHT: 0.5, CACHE: 0.2, ACTIVATION: 0.3, STATE: 0.0},
})  # fmt: skip
PROGRAMS_LIMIT: Final = 512


def kind_of(letter: str) -> str:
    """Kind of a value, from the letter that the client gave it."""
    return letter if letter in KINDS else _COUNTED.get(letter, ACTIVATION)


class Budgets:
    """Shares of memory by phase: the last uses of the sessions that have been in it, added up; before, assumptions.

    A use is a whole working set (`Usage`), so one is enough to know a session by, and none need be averaged: a budget that
    follows an average is wrong when a conversation begins anew.
    """

    def __init__(self) -> None:
        self._used: dict[str, dict[int, Mapping[str, int]]] = {}  # by phase and session
        self._shares: dict[str, dict[str, float]] = {}

    def shares(self, phase: str) -> Mapping[str, float]:
        """Of the memory, by kind; together 1."""
        key = counted_phase(phase)
        return self._shares.get(key) or _ASSUMED.get(key) or _ASSUMED[""]

    @property
    def phases(self) -> Sequence[str]:
        """The phases of which runs were seen."""
        return list(self._shares)

    def observe(self, phase: str, session: int, used: Mapping[str, int]) -> None:
        """Note the bytes of each kind that a run of a session used in that phase."""
        if any(used.values()):
            key = counted_phase(phase)
            sessions = self._used.setdefault(key, {})
            sessions[session] = used
            by_kind = {kind: sum(one.get(kind, 0) for one in sessions.values()) for kind in KINDS}
            total = sum(by_kind.values())
            self._shares[key] = {kind: nbytes / total for kind, nbytes in by_kind.items()}

    def forget(self, session: int) -> None:
        """A session has ended. Shares stay as they are until another one runs."""
        for sessions in self._used.values():
            sessions.pop(session, None)

    def over(self, phase: str, held: Counter[str], budget: int) -> tuple[str, ...]:
        """The kinds that hold more than their share."""
        shares = self.shares(phase)
        return tuple([kind for kind in KINDS if held[kind] > shares[kind] * budget])


def counted_phase(phase: str) -> str:
    """The phase whose shares count: training is one, and one that is not known is none."""
    return _TRAINING if phase.startswith(_TRAINING) else phase if phase in _PHASES else ""


@attrs.define
class _RecentStorage:
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
        self._ran: LruCache[bytes, int] = LruCache(PROGRAMS_LIMIT)  # by template its last run
        self._touched: dict[str, dict[int, _RecentStorage]] = {}  # by phase and storage, the last used last
        self._since = 0
        self._before: Mapping[str, int] = {}

    def begin(self, phase: str, digest: bytes, inputs: Iterable[tuple[int, str]]) -> None:
        """Begin a run of a template, before anything is evicted for it. `inputs`: handles with their kinds."""
        phase = counted_phase(phase)
        self._run += 1
        self._since = self._ran.get(digest, 0)
        self._ran.store(digest, self._run)
        self._touch(phase, inputs)
        self._before = self._held(phase)

    def end(self, phase: str, outputs: Sequence[tuple[int, str]], peak: int) -> Mapping[str, int]:
        """End the run, which took at most `peak` bytes of new memory at once; the bytes that it used, by kind."""
        phase = counted_phase(phase)
        new = self._touch(phase, outputs)
        after, made = self._held(phase), Counter[str]()
        for storage, kind in new.items():
            made[kind] += self._values.bytes_of(storage)
        used = {kind: max(self._before.get(kind, 0), after[kind]) for kind in KINDS}
        persistent = made.total() - made[ACTIVATION]
        used[ACTIVATION] = self._before.get(ACTIVATION, 0) + max(made[ACTIVATION], peak - persistent)
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
            touched[storage] = _RecentStorage(self._run, kept)
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
