"""Facts about each part of an outline: cost, phases, resident values, devices, and patterns."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from djinn_core.ir.costs import CostEstimate
from djinn_core.ir.handles import storage_of
from djinn_core.ir.placement import HintUse
from djinn_core.ir.profile import DataResidency, ExecutionPhase, PatternMatch
from djinn_core.ir.result import PipelineResult, TrialTimes
from djinn_profiler.explain.outline import Part

_NUMBER = re.compile(r"\d+")


@attrs.frozen
class Decision:
    """A decision based on matches.

    Attributes:
        about: name of the hints on which it is based, or `memory`.
        by: name of the placement policy that read the hints, or `executor`.
        decision: the decision, or why the policy made no decision.
        seconds_before: predicted time of the program without the decision, or None if not predicted.
        seconds_after: predicted time with the decision, or None if not predicted.
        measured: times of the session's trials of the policy. None without trials, or without a predicted time.
    """

    about: str
    by: str
    decision: str
    seconds_before: float | None = None
    seconds_after: float | None = None
    measured: TrialTimes | None = None


@attrs.frozen
class MatchSummary:
    """Matches of one pattern in one part, with equal reasons.

    Attributes:
        reason: the first match's reason.
        confidence: the lowest confidence of the matches.
        details: facts that all matches share.
        decisions: decisions based on the matches; empty before the program is placed.
    """

    pattern: str
    count: int
    confidence: float
    reason: str
    details: Mapping[str, Any]
    decisions: tuple[Decision, ...] = ()


@attrs.frozen
class Facts:
    """Facts about one part, folded parts included.

    Attributes:
        ops: number of ops.
        remaining_ops: number of ops after the optimizations.
        flops: number of floating-point operations.
        bytes_moved: memory traffic in bytes.
        seconds: predicted time on the device of the part.
        phases: ops by phase.
        devices: ops by device.
        operations: ops by name.
        slowest_ops: names of the computing ops, the slowest first.
        resident_bytes: bytes that its ops read or allocate, by residency, without activations.
        patterns: matches in it that no single subpart contains.
    """

    ops: int
    remaining_ops: int
    flops: float
    bytes_moved: int
    seconds: float
    phases: Mapping[str, int]
    devices: Mapping[str, int]
    operations: Mapping[str, int]
    slowest_ops: tuple[str, ...]
    resident_bytes: Mapping[str, int]
    patterns: tuple[MatchSummary, ...]

    @property
    def phase(self) -> str:
        """Return the phase of most ops, or an empty text if no phase is known."""
        return next((p for p in self.phases if p != ExecutionPhase.UNKNOWN.value), "")


@attrs.define(slots=False)
class Survey:
    """Collect the facts of every part of one outline."""

    result: PipelineResult
    whole: Part

    def facts(self, part: Part) -> Facts:
        """Return the facts about `part`."""
        estimates = [e for e in map(self._estimates.get, part.nodes) if e is not None]
        nodes = self.result.graph.nodes
        return Facts(
            ops=len(part.nodes),
            remaining_ops=sum(n in self._remaining_nodes for n in part.nodes),
            flops=sum(e.flops for e in estimates),
            bytes_moved=sum(e.bytes_read + e.bytes_written for e in estimates),
            seconds=sum(e.seconds for e in estimates),
            phases=_count(self._phases[n] for n in part.nodes if n < len(self._phases)),
            devices=_count(self._devices[n] for n in part.nodes if n in self._devices),
            operations=_count(nodes[n].operation for n in part.nodes),
            slowest_ops=self._slowest_ops(part),
            resident_bytes=self._resident_bytes(part),
            patterns=tuple(_summaries(self._matches.get(id(part), ()), self._decisions)),
        )

    @property
    def has_costs(self) -> bool:
        """Return True if costs were estimated."""
        return self.result.costs is not None

    @property
    def is_spread(self) -> bool:
        """Return True if the program was placed on more than one device."""
        return self.result.placement is not None and len(self.result.placement.devices) > 1

    @cached_property
    def _phases(self) -> list[str]:
        return [p.value for p in self.result.profile.phases] if self.result.profile is not None else []

    @cached_property
    def _devices(self) -> dict[int, str]:
        placement = self.result.placement
        return {d.node: d.device for d in placement.decisions} if placement is not None else {}

    @cached_property
    def _remaining_nodes(self) -> frozenset[int]:
        plan = self.result.plan
        return frozenset(plan.nodes if plan is not None else range(len(self.result.graph.nodes)))

    @cached_property
    def _estimates(self) -> dict[int, CostEstimate]:
        """Return each node's cost on its device, or on the first device if it was not placed."""
        costs = self.result.costs
        if costs is None or not costs.by_device:
            return {}
        first = next(iter(costs.by_device))
        count = len(self.result.graph.nodes)
        return {n: costs.by_device[self._devices.get(n, first)][n] for n in range(count)}

    @cached_property
    def _kinds(self) -> dict[int, tuple[str, int]]:
        """Return kind (residency) and bytes of each storage, except storages of activations."""
        kinds: dict[int, tuple[str, int]] = {}
        profile = self.result.profile
        for value, kind in (profile.residency if profile is not None else {}).items():
            if kind is not DataResidency.EPHEMERAL_ACTIVATION:
                entry = kinds.get(storage_of(value), ("", 0))
                kinds[storage_of(value)] = kind.value, max(entry[1], self._nbytes(value))
        return kinds

    def _nbytes(self, value: int) -> int:
        meta = self.result.graph.meta(value)
        return min(meta.nbytes, meta.extent * meta.dtype.itemsize)  # an expanded dimension takes no memory

    def _slowest_ops(self, part: Part) -> tuple[str, ...]:
        graph, seconds_by_op = self.result.graph, dict[str, float]()
        looks = graph.flow.pass_through
        computing = [n for n in part.nodes if not looks[n]] or part.nodes
        for node in computing:
            name, estimate = graph.nodes[node].operation, self._estimates.get(node)
            seconds_by_op[name] = seconds_by_op.get(name, 0.0) + (estimate.seconds if estimate is not None else 1.0)
        return tuple(sorted(seconds_by_op, key=lambda name: -seconds_by_op[name]))

    def _resident_bytes(self, part: Part) -> dict[str, int]:
        nodes, kinds = self.result.graph.nodes, self._kinds
        storages = {storage_of(v) for n in part.nodes for v in (*nodes[n].inputs, *nodes[n].outputs)}
        bytes_by_kind: dict[str, int] = {}
        for storage in sorted(storages & kinds.keys()):
            kind, nbytes = kinds[storage]
            bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + nbytes
        return dict(sorted(bytes_by_kind.items(), key=lambda item: -item[1]))

    @cached_property
    def _matches(self) -> dict[int, list[PatternMatch]]:
        """Return for each part the matches that it contains and that no single subpart contains."""
        matches: dict[int, list[PatternMatch]] = defaultdict(list)
        for match in self.result.profile.patterns if self.result.profile is not None else ():
            matches[id(_smallest(self.whole, match.nodes))].append(match)
        return matches

    def _decisions(self, matches: Sequence[PatternMatch]) -> tuple[Decision, ...]:
        placement = self.result.placement
        if placement is None:
            return ()
        uses = {use.hint: use for use in placement.uses}
        policy, measured = placement.policy, self.result.trial_times.get(placement.policy)
        rows = []
        for name in dict.fromkeys(name for match in matches for name, facts in match.hints.items() if facts):
            use = uses.get(name) or HintUse(name, "not used: this policy does not read it")
            trials = measured if use.seconds_before is not None else None
            rows.append(Decision(name, policy, use.decision, use.seconds_before, use.seconds_after, trials))
        if any(DataResidency.STATEFUL_KV_CACHE in match.residency.values() for match in matches):
            rows.append(Decision("memory", "executor", "`kv_session` finds these values as a KV cache"))
        return tuple(rows) or (Decision("", "", "nothing follows from it"),)


def _smallest(part: Part, nodes: Sequence[int]) -> Part:
    """Return the smallest part that contains all of the nodes. A module's ops between submodules count as no part."""
    while True:
        inner = next((p for p in part.parts if not p.is_own and nodes and nodes[0] in p.members), None)
        if inner is None or not inner.members.issuperset(nodes):
            return part
        part = inner


def _summaries(
    matches: Sequence[PatternMatch], decisions: Callable[[Sequence[PatternMatch]], tuple[Decision, ...]]
) -> Iterable[MatchSummary]:
    groups: dict[tuple[str, str], list[PatternMatch]] = defaultdict(list)
    for match in matches:
        groups[match.pattern, _NUMBER.sub("#", match.reason)].append(match)
    for (pattern, _), group in groups.items():
        shared_details = {
            name: fact for name, fact in group[0].details.items() if all(m.details.get(name) == fact for m in group)
        }
        confidence = min(m.confidence for m in group)
        yield MatchSummary(pattern, len(group), confidence, group[0].reason, shared_details, decisions(group))


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def first_few(names: Sequence[str], limit: int = 3) -> str:
    """Return the first `limit` names as a text, with an ellipsis if there are more."""
    return ", ".join(names[:limit]) + (" …" if len(names) > limit else "")
