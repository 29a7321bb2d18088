"""Kinds of values that earlier programs made or took: weights, caches, gradients, the optimizer's state; text and pictures.

A program says by itself what most of its values are, and some only together with those before it: an update whose gradients
came from another program, a cache that is put in another order, features of a picture that take their places in a text. Programs that ran lately are kept with their values, by
which plan; what the plan's first program was found to be about says what these are. Nothing is looked up before a program
comes that was not planned before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import attrs

from djinn_client.runtime.planning.planner import Recent
from djinn_core.ir.handles import storage_of
from djinn_core.ir.profile import DataResidency, Lineage, Modality
from djinn_core.ir.program import Program
from djinn_core.planning.stages.annotate import Known
from djinn_core.planning.stages.annotating.lineage import kind_of
from djinn_core.system.lru import LruCache

_PLANS = 512
_CARRIED = frozenset({
    DataResidency.GRADIENT, DataResidency.OPTIMIZER_STATE, DataResidency.PERSISTENT_WEIGHT, DataResidency.STATEFUL_KV_CACHE,
})  # fmt: skip


@attrs.frozen
class _CarriedKinds:
    """Kinds of values that outlive the programs of a plan, by position among their values."""

    plan: object
    facts: tuple[tuple[int, DataResidency | Modality], ...]


class ResidencyHistory:
    """Classification of values by the programs that ran lately. Not thread-safe: the caller holds the session's lock."""

    def __init__(self, recent: Recent | None = None) -> None:
        """`recent`: plans that ran, each with its program, the latest last."""
        self._recent: Recent = deque(maxlen=0) if recent is None else recent
        self._carried: LruCache[int, _CarriedKinds] = LruCache(_PLANS)

    def planned(
        self,
        plan: object,
        program: Program,
        residency: Mapping[int, DataResidency],
        lineage: Sequence[Lineage] = (),
    ) -> None:
        """Register a new plan with its program, how long its values live, and what the results of its ops derive from."""
        kinds: dict[int, DataResidency | Modality] = {}
        for made, bits in zip(program.instructions(), lineage, strict=False):
            if (kind := kind_of(int(bits))) is not Modality.UNKNOWN:
                kinds.update(dict.fromkeys((v for v in made.outputs if v not in program.dead), kind))
        kinds |= {value: kind for value, kind in residency.items() if kind in _CARRIED}
        values = enumerate(dict.fromkeys(program.operands)) if kinds else ()
        facts = [(i, kinds[v]) for i, v in values if v in kinds]
        facts.sort(key=lambda fact: isinstance(fact[1], Modality))  # how long memory lives says more than a view's data
        self._carried.store(id(plan), _CarriedKinds(plan, tuple(facts)))

    def residency(self, program: Program) -> Known:
        """Known kinds of a new program's values; the latest program that used a tensor's memory decides."""
        if not any(carried.facts for carried in self._carried.values()):
            return {}
        by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for value in dict.fromkeys(program.operands):
            by_storage[storage_of(value)].append(value)
        known: dict[int, DataResidency | Modality] = {}
        for plan, ran in reversed(self._recent):
            carried = self._carried.get(id(plan))
            if carried is None or not carried.facts:
                continue
            values = [*dict.fromkeys(ran.operands)]
            for position, kind in carried.facts:
                for value in by_storage.pop(storage_of(values[position]), ()):
                    known[value] = kind
        return known
