"""Kinds of a session's values, such as weights and KV caches, from the client's hints about templates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import ExecutionPhase
from djinn_core.system.lru import LruCache
from djinn_core.wire.messages import ValueHints
from djinn_server.running.values import ValueTable

HINTS_LIMIT: Final = 512  # templates with hints
LETTERS_LIMIT: Final = 4 << 20  # letters in the hints of all templates
# By the letters of `ValueHints`. Values without a hint count as activations.
KINDS: Final[Mapping[int, str]] = MappingProxyType({
    ord("w"): "weights",
    ord("k"): "caches",
    ord("o"): "optimizer",
    ord("g"): "gradients",
    ord("i"): "inputs",
    ord("a"): "activations",
})  # fmt: skip
_CACHES: Final = KINDS[ord("k")]
_ACTIVATIONS: Final = KINDS[ord("a")]
_PHASES: Final = frozenset(phase.value for phase in ExecutionPhase)


class ValueKinds:
    """Kinds of values by storage.

    `phase`, `by_kind` and `caches` are thread-safe. Only the session's thread calls other methods. A run costs one
    assignment: kinds are computed on demand from each template's last run. With `at_once`, each run computes them.
    """

    def __init__(self, values: ValueTable, *, at_once: bool = False) -> None:
        self._values, self._at_once = values, at_once
        self._hints: LruCache[bytes, ValueHints] = LruCache(HINTS_LIMIT)
        self._letter_count = 0
        self._last_runs: dict[bytes, tuple[Sequence[int], Sequence[int]]] = {}
        self._kinds: dict[int, str] = {}  # by storage
        self._last_digest = b""

    def learn(self, hints: ValueHints) -> None:
        """Store the kinds of a template's values from the client's hints."""
        before = self._hints.pop(hints.digest, None)
        dropped_hints = [*self._hints.store(hints.digest, hints), *([before] if before is not None else [])]
        self._letter_count += _size(hints) - sum(map(_size, dropped_hints))
        while self._letter_count > LETTERS_LIMIT:
            self._letter_count -= _size(self._hints.pop(next(iter(self._hints))))

    def ran(self, digest: bytes, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Record the last run of a template. `inputs`, `outputs`: handles."""
        self._last_digest = digest
        if self._at_once:
            self._note(digest, inputs, outputs)
            if len(self._kinds) > 2 * HINTS_LIMIT + 4 * len(self._values):
                self._kinds = {storage: kind for storage, kind in self._kinds.items() if self._values.bytes_of(storage)}
            return
        last_runs = self._last_runs  # another thread may replace the attribute meanwhile
        if digest not in last_runs and len(last_runs) >= HINTS_LIMIT:  # no thread has called `by_kind`
            last_runs.pop(next(iter(last_runs)))
        last_runs[digest] = (inputs, outputs)

    @property
    def phase(self) -> str:
        """Phase of the last program, or "" if the client sent no hints."""
        last = self._hints.get(self._last_digest)
        return last.phase if last is not None and last.phase in _PHASES else ""

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of values by kind, on or off the device. Return {} if the client sent no hints."""
        self._apply_last_runs()
        if not self._hints:
            return {}
        by_kind: dict[str, int] = {}
        for storage, kind in list(self._kinds.items()):
            nbytes = self._values.bytes_of(storage)
            if nbytes:
                by_kind[kind] = by_kind.get(kind, 0) + nbytes
            else:
                self._kinds.pop(storage, None)
        unknown = self._values.held_bytes - sum(by_kind.values())
        if unknown > 0:
            by_kind[_ACTIVATIONS] = by_kind.get(_ACTIVATIONS, 0) + unknown
        return by_kind

    def caches(self) -> set[int]:
        """Return the storages of KV caches."""
        self._apply_last_runs()
        return {storage for storage, kind in list(self._kinds.items()) if kind == _CACHES}

    def output_caches(self, digest: bytes, outputs: Iterable[int]) -> set[int]:
        """Return the storages of KV caches among the outputs of a template."""
        hints = self._hints.get(digest)
        letters = b"" if hints is None else hints.outputs
        return {
            storage_of(handle)
            for handle, letter in zip(outputs, letters, strict=False)
            if KINDS.get(letter) == _CACHES
        }  # fmt: skip

    def mark_caches(self, handles: Collection[int]) -> None:
        """Record that the values of these handles are KV caches."""
        self._kinds.update(dict.fromkeys(map(storage_of, handles), _CACHES))

    def _apply_last_runs(self) -> None:
        last_runs, self._last_runs = self._last_runs, {}
        for digest, (inputs, outputs) in list(last_runs.items()):
            self._note(digest, inputs, outputs)

    def _note(self, digest: bytes, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        hints, kinds = self._hints.get(digest), self._kinds
        if hints is None:
            return
        for handles, letters in ((inputs, hints.inputs), (outputs, hints.outputs)):
            for handle, letter in zip(handles, letters, strict=False):
                kind, storage = KINDS.get(letter), storage_of(handle)
                if kind is not None and (kind != _ACTIVATIONS or storage not in kinds):
                    kinds[storage] = kind


def _size(hints: ValueHints) -> int:
    return len(hints.inputs) + len(hints.outputs)
