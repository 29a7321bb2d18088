"""Plans remembered: the steady state looks up what the first run decided.

Two levels. The *profile* of a program is found again by its topology and the classes of its shapes (rank, dtype, which
sizes are 0 or 1, order of the strides). The whole *plan* is found again by these, its sizes, where its inputs live, the
devices and the plugins. Sizes of weights count exactly; other sizes to within a factor of the square root of two, so that
a growing KV cache does not mean a new plan for every token. Facts in a plan that was found again, such as the number of
keys, are those of the program that it was made for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import attrs

from djinn_core.ir.plan import conditions_hold
from djinn_core.ir.program import Call, Program
from djinn_core.ir.result import PipelineResult
from djinn_core.ir.values import storage_of

_BUCKETS_PER_OCTAVE = 2
V = TypeVar("V")


@attrs.frozen
class Fingerprint:
    """What a program's plan depends on, with its values numbered by first appearance.

    Attributes:
        topology: digest of forms, shape classes, data flow, shared memory and what is dead at the end.
        shapes: digest of the sizes.
        values: the program's values in order of first appearance.
    """

    topology: bytes
    shapes: bytes
    values: tuple[int, ...]


@attrs.define
class _Levels:
    hits: int = 0
    misses: int = 0


class _Recent(Generic[V]):
    """The most recently used entries, at most `capacity`; not locked."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: OrderedDict[Hashable, V] = OrderedDict()
        self.count = _Levels()

    def find(self, key: Hashable) -> V | None:
        found = self.entries.get(key)
        if found is None:
            self.count.misses += 1
            return None
        self.count.hits += 1
        self.entries.move_to_end(key)
        return found

    def store(self, key: Hashable, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


@attrs.frozen
class Remembered:
    """A result, and the values of the program that it was made for in order of first appearance."""

    result: PipelineResult
    values: tuple[int, ...]

    def names(self, values: tuple[int, ...]) -> dict[int, int]:
        """For each value of the remembered program the one in its place."""
        return dict(zip(self.values, values, strict=True))


class PlanCache:
    """Results of the pipeline, bounded by number, for any number of threads."""

    def __init__(self, capacity: int = 256) -> None:
        """Remember at most `capacity` plans and as many profiles."""
        self._lock = threading.Lock()
        self._profiles: _Recent[Remembered] = _Recent(capacity)
        self._plans: _Recent[Remembered] = _Recent(capacity)

    def find_plan(self, key: Hashable, program: Program) -> Remembered | None:
        """The plan of that key, if the scalars of `program` meet the plan's conditions."""
        with self._lock:
            found = self._plans.find(key)
            plan = found.result.plan if found else None
            if plan is not None and not conditions_hold(plan.equal_slots, program.slots):
                self._plans.count.hits -= 1
                self._plans.count.misses += 1
                return None
            return found

    def find_profile(self, key: Hashable) -> Remembered | None:
        """A result with the profile of that key."""
        with self._lock:
            return self._profiles.find(key)

    def store(self, profile_key: Hashable, plan_key: Hashable, remembered: Remembered) -> None:
        """Remember a result; the least recently used are forgotten."""
        with self._lock:
            self._profiles.store(profile_key, remembered)
            self._plans.store(plan_key, remembered)

    def clear(self) -> None:
        """Forget everything, the statistics as well."""
        with self._lock:
            self._profiles = _Recent(self._profiles.capacity)
            self._plans = _Recent(self._plans.capacity)

    def statistics(self) -> Mapping[str, int]:
        """Hits, misses and entries of both levels."""
        with self._lock:
            return {
                f"{name}_{field}": number
                for name, level in (("plan", self._plans), ("profile", self._profiles))
                for field, number in (
                    ("hits", level.count.hits), ("misses", level.count.misses), ("entries", len(level.entries))
                )
            }  # fmt: skip


def fingerprint(program: Program) -> Fingerprint:
    """The fingerprint of a program, in one walk over it. Valid in this process only."""
    numbers: dict[int, int] = {}
    weights: list[str] = []
    sizes: list[int] = []
    at = 0
    operands = program.operands
    for call in program.calls:
        for position, meta in enumerate(call.operands, at):
            value = operands[position]
            if value not in numbers:  # not made by any op so far: it comes from outside
                numbers[value] = len(numbers)
                if meta.dtype.is_floating_point and len(meta.shape) <= 2:
                    weights.append(str(meta.shape))
        end = at + call.operand_count + call.new_count
        for position in range(at + call.operand_count, end):
            numbers[operands[position]] = len(numbers)
        sizes.append(_size_class(call))
        at = end
    topology = hashlib.blake2b(digest_size=16)
    topology.update(array("q", [call.signature.id for call in program.calls]))
    topology.update(array("q", [numbers[v] for v in operands]))
    storages: dict[int, int] = {}
    topology.update(array("q", [storages.setdefault(storage_of(v), len(storages)) for v in numbers]))
    topology.update(bytes([v in program.dead for v in numbers]))
    shapes = hashlib.blake2b("".join(weights).encode(), digest_size=16)
    shapes.update(array("q", sizes))
    return Fingerprint(topology.digest(), shapes.digest(), tuple(numbers))


_classes: dict[tuple[tuple[int, ...], ...], int] = {}
_class_of: dict[Call, int] = {}
_CALLS_LIMIT = 65536
_numbers = itertools.count()  # never gives two threads the same number


def _size_class(call: Call) -> int:
    """A number for the rough sizes of everything that a call touches."""
    found = _class_of.get(call)
    if found is None:
        if len(_class_of) >= _CALLS_LIMIT:
            _class_of.clear()
        metas = (m for m in (*call.operands, *call.results) if m is not None)
        rough = tuple(tuple(_rough(n) for n in m.shape) for m in metas)
        found = _class_of[call] = _classes.setdefault(rough, next(_numbers))
    return found


def _rough(size: int) -> int:
    """The number of the bucket that `size` falls into."""
    return -1 if size == 0 else math.floor(_BUCKETS_PER_OCTAVE * math.log2(size))
