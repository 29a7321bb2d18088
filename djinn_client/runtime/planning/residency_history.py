"""Kinds of values that earlier programs computed or used: weights, caches, gradients, optimizer state, text, images.

A program alone shows the kinds of most of its values. Some kinds need earlier programs: an update with gradients of
another program, a reordered cache, image features that are inserted into a text. So the history keeps recent programs
with their values, by plan. The kinds found for the first program of a plan then classify these values. Only unplanned
programs are looked up.
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
    """Kinds of values that outlive the programs of a plan.

    Attributes:
        plan: the plan. This reference keeps it alive, because the history finds it by its identity.
        facts: (position among the program's values, kind).
    """

    plan: object
    facts: tuple[tuple[int, DataResidency | Modality], ...]


class ResidencyHistory:
    """Classification of values by recent programs. Not thread-safe: the caller holds the session's lock."""

    def __init__(self, recent: Recent | None = None) -> None:
        """Create a history. `recent`: executed plans, each with its program, latest last."""
        self._recent: Recent = deque(maxlen=0) if recent is None else recent
        self._carried: LruCache[int, _CarriedKinds] = LruCache(_PLANS)

    def note_plan(
        self,
        plan: object,
        program: Program,
        residency: Mapping[int, DataResidency],
        lineage: Sequence[Lineage] = (),
    ) -> None:
        """Record the kinds of values of a new plan.

        Args:
            plan: the plan.
            program: the plan's first program.
            residency: residency of the program's values, by handle.
            lineage: for each instruction, the kinds of data from which its results were computed.
        """
        kinds: dict[int, DataResidency | Modality] = {}
        for instruction, bits in zip(program.instructions(), lineage, strict=False):
            if (kind := kind_of(int(bits))) is not Modality.UNKNOWN:
                kinds.update(dict.fromkeys((v for v in instruction.outputs if v not in program.dead), kind))
        kinds |= {value: kind for value, kind in residency.items() if kind in _CARRIED}
        values = enumerate(dict.fromkeys(program.operands)) if kinds else ()
        facts = [(i, kinds[v]) for i, v in values if v in kinds]
        # the lifetime of memory is more significant than a view's data
        facts.sort(key=lambda fact: isinstance(fact[1], Modality))
        self._carried.store(id(plan), _CarriedKinds(plan, tuple(facts)))

    def residency(self, program: Program) -> Known:
        """Return the known kinds of a new program's values, by handle.

        The kind of a value is that of the latest program that used its storage.
        """
        if not any(carried.facts for carried in self._carried.values()):
            return {}
        by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for value in dict.fromkeys(program.operands):
            by_storage[storage_of(value)].append(value)
        kinds: dict[int, DataResidency | Modality] = {}
        for plan, earlier_program in reversed(self._recent):
            carried = self._carried.get(id(plan))
            if carried is None or not carried.facts:
                continue
            values = [*dict.fromkeys(earlier_program.operands)]
            for position, kind in carried.facts:
                for value in by_storage.pop(storage_of(values[position]), ()):
                    kinds[value] = kind
        return kinds
