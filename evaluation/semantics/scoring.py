"""Accuracy of a classifier: its matches, phases, workload types and residencies against the ground truth.

A match is *right* if it covers enough of the core of an instance of its kind, and at least half of it lies in the span.
It is *open* if it covers only optional instances; open matches do not count. All other matches are wrong: without a
core, duplicates of another match, and, for single things such as an attention, matches that cover several. An instance
is *found* if right matches together cover enough of its core.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs

from djinn.planning import DataResidency, PatternMatch, WorkloadProfile, storage_of
from evaluation.semantics.ground_truth import Instance, Labelled

# names of instances, and names of matches in pattern packages
NAMES: dict[str, frozenset[str]] = {
    "attention": frozenset({"attention"}),
    "kv_cache": frozenset({"kv_cache"}),
    "convolution": frozenset({"convolution", "conv", "convolution_block"}),
    "mlp": frozenset({"mlp", "gated_mlp"}),
    "embedding": frozenset({"embedding", "token_embedding"}),
    "fusion": frozenset({"fusion", "fusion_point", "multimodal_fusion"}),
    "embedding_bag": frozenset({"embedding_bag"}),
}
# Share of a core that a match must cover, and that must be covered in total. If both are small, any of several ops in
# the core suffices.
_ENOUGH = {"mlp": (0.6, 0.6), "attention": (1.0, 1.0)}
_ANY = (0.01, 0.01)
_SEVERAL = frozenset({"convolution", "embedding", "embedding_bag", "fusion"})
_INSIDE = 0.5


@attrs.frozen
class JudgedMatch:
    """A match with its verdict: True if right, False if wrong, None if open."""

    match: PatternMatch
    right: bool | None


@attrs.frozen
class PatternScore:
    """Verdicts on the matches of one pattern in one program, the number of found instances, and the missed instances."""

    judged: tuple[JudgedMatch, ...]
    found: int
    missed: tuple[Instance, ...]


@attrs.frozen
class Score:
    """Accuracy of a profile.

    Attributes:
        patterns: score by pattern name in `NAMES`.
        phases, modalities: number of nodes with the right label, and of all labelled nodes. residencies: the same of values.
        workload: True if the workload type is right.
        wrong_phases: nodes with a wrong phase. wrong_residencies: values with a wrong residency.
    """

    patterns: Mapping[str, PatternScore]
    phases: tuple[int, int]
    modalities: tuple[int, int]
    residencies: tuple[int, int]
    workload: bool
    wrong_phases: tuple[int, ...]
    wrong_residencies: tuple[int, ...]


def score(labelled: Labelled, profile: WorkloadProfile) -> Score:
    """Compare a profile with the ground truth."""
    truth = labelled.truth
    wrong = tuple(n for n, right in truth.phases.items() if profile.phases[n] not in right)
    residency = {v: profile.residency.get(v, DataResidency.EPHEMERAL_ACTIVATION) for v in truth.residency}
    misplaced = tuple(v for v, right in truth.residency.items() if residency[v] is not right)
    modal = sum(profile.modalities[n] is right for n, right in truth.modalities.items())
    return Score(
        patterns={name: of_pattern(name, truth.instances, profile.patterns) for name in NAMES},
        phases=(len(truth.phases) - len(wrong), len(truth.phases)),
        modalities=(modal, len(truth.modalities)),
        residencies=(len(residency) - len(misplaced), len(residency)),
        workload=profile.workload in truth.workloads,
        wrong_phases=wrong,
        wrong_residencies=misplaced,
    )


def of_pattern(name: str, instances: Iterable[Instance], matches: Iterable[PatternMatch]) -> PatternScore:
    """Return the score of the matches of one pattern. Matches with the highest confidence are judged first."""
    mine = [i for i in instances if i.pattern == name]
    inputs = sorted((m for m in matches if m.pattern in NAMES[name]), key=lambda m: (-m.confidence, m.nodes))
    covered: dict[int, set[int]] = defaultdict(set)
    judgements = [JudgedMatch(match, _judge(name, match, mine, covered)) for match in inputs]
    _, whole = _ENOUGH.get(name, _ANY)
    required = [(k, i) for k, i in enumerate(mine) if i.required]
    missed = tuple(i for k, i in required if len(covered[k]) < (i.enough or whole) * len(_core(i)))
    return PatternScore(tuple(judgements), len(required) - len(missed), missed)


def _core(instance: Instance) -> frozenset[int]:
    return instance.values or instance.core


def _reach(match: PatternMatch, instance: Instance) -> set[int]:
    """Return the part of an instance's core that a match covers. For caches, return the storages that the match names."""
    return set(
        instance.values & set(map(storage_of, match.residency)) if instance.values else instance.core & set(match.nodes)
    )


def _judge(name: str, match: PatternMatch, instances: Sequence[Instance], covered: dict[int, set[int]]) -> bool | None:
    part, _ = _ENOUGH.get(name, _ANY) if name != "kv_cache" else (1.0, 1.0)
    reach = {k: _reach(match, i) for k, i in enumerate(instances)}
    touched = [k for k, r in reach.items() if r]
    hit = [k for k in touched if len(reach[k]) >= (instances[k].enough or part) * len(_core(instances[k]))]
    required = [k for k in hit if instances[k].required]
    if touched and not any(instances[k].required for k in touched):
        return None
    if not required or (len(required) > 1 and name not in _SEVERAL):
        return False
    span = frozenset().union(*(instances[k].span for k in hit))
    if len(span & set(match.nodes)) < _INSIDE * len(match.nodes):
        return False
    if all(reach[k] <= covered[k] for k in required):
        return False
    for k in required:
        covered[k] |= reach[k]
    return True


@attrs.define
class Sum:
    """Total scores of many programs."""

    judged: dict[str, list[JudgedMatch]] = attrs.field(factory=lambda: defaultdict(list))
    found: Counter[str] = attrs.field(factory=Counter)
    missed: Counter[str] = attrs.field(factory=Counter)
    phases: dict[str, list[tuple[int, int]]] = attrs.field(factory=lambda: defaultdict(list))
    residencies: list[tuple[int, int]] = attrs.field(factory=list)
    modalities: list[tuple[int, int]] = attrs.field(factory=list)
    workloads: list[bool] = attrs.field(factory=list)

    def add(self, situation: str, score: Score) -> None:
        """Add the score of one program."""
        for name, pattern in score.patterns.items():
            self.judged[name] += pattern.judged
            self.found[name] += pattern.found
            self.missed[name] += len(pattern.missed)
        self.phases[situation].append(score.phases)
        self.residencies.append(score.residencies)
        self.modalities.append(score.modalities)
        self.workloads.append(score.workload)

    def precision(self, name: str) -> float | None:
        """Return the share of right matches of a pattern, or None without matches."""
        verdicts = [j.right for j in self.judged[name] if j.right is not None]
        return sum(verdicts) / len(verdicts) if verdicts else None

    def recall(self, name: str) -> float | None:
        """Return the share of found instances of a pattern, or None without instances."""
        count = self.found[name] + self.missed[name]
        return self.found[name] / count if count else None

    def phase_accuracy(self, *situations: str) -> float | None:
        """Return the share of nodes with a right phase, in these situations or, without arguments, in all."""
        return share(pair for s, pairs in self.phases.items() if not situations or s in situations for pair in pairs)

    def calibration(self, *names: str) -> tuple[float, float] | None:
        """Return the mean confidence of these patterns' matches, and the share of right matches, or None without matches."""
        judgements = [j for name in names or NAMES for j in self.judged[name] if j.right is not None]
        stated = sum(j.match.confidence for j in judgements)
        return (
            (stated / len(judgements), sum(j.right is True for j in judgements) / len(judgements))
            if judgements
            else None
        )


def least(right: int, count: int) -> float | None:
    """Return the lower bound of Wilson's 95 % interval of the share `right / count`, or None if `count` is 0."""
    if not count:
        return None
    z, share = 1.959964, right / count
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (share + z * z / (2 * count) - spread) / (1 + z * z / count)


def share(pairs: Iterable[tuple[int, int]]) -> float | None:
    """Return the sum of the pairs' first numbers divided by the sum of the second numbers, or None without pairs."""
    right, count = map(sum, zip(*pairs, strict=True)) if (pairs := list(pairs)) else (0, 0)
    return right / count if count else None
