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
# kinds of a pattern: values of facts
KINDS: dict[str, tuple[tuple[str, object], ...]] = {
    "attention": (
        ("kind", "self"), ("kind", "cross"), ("causal", True),
    ),
    "kv_cache": (
        ("layout", "growing"), ("layout", "static"), ("attends", "self"), ("attends", "cross"), ("sliding", True),
        ("quantised", True),
    ),
}  # fmt: skip
# Share of a core that a match must cover, and that must be covered in total. If both are small, any of several ops in
# the core suffices.
_ENOUGH = {"mlp": (0.6, 0.6), "attention": (1.0, 1.0)}
_ANY = (0.01, 0.01)
_SEVERAL = frozenset({"convolution", "embedding", "embedding_bag", "fusion"})
_INSIDE = 0.5


@attrs.frozen
class Fact:
    """A fact to compare: the true value, and that of a match (None if missing)."""

    true: object
    said: object = None

    @property
    def right(self) -> bool | None:
        """Return True if both agree; None if the match has no value."""
        return None if self.said is None else self.true == self.said


@attrs.frozen
class Judged:
    """A match with its verdict; None if open.

    Attributes:
        facts: by name, the facts that the configuration states about the covered instance.
    """

    match: PatternMatch
    right: bool | None
    facts: Mapping[str, Fact] = attrs.field(factory=dict)


@attrs.frozen
class PatternScore:
    """Verdicts on the matches of one pattern in one program, and the missed instances."""

    judged: tuple[Judged, ...]
    found: int
    missed: tuple[Instance, ...]


@attrs.frozen
class Score:
    """Accuracy of a profile.

    Attributes:
        patterns: by name in `NAMES`.
        phases: number of right nodes, and of all nodes. modalities, residencies: likewise.
        workload: True if the type is right.
        wrong_phases: nodes with a wrong phase.
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
    """Return the accuracy of the matches of one pattern, the surest first."""
    mine = [i for i in instances if i.pattern == name]
    given = sorted((m for m in matches if m.pattern in NAMES[name]), key=lambda m: (-m.confidence, m.nodes))
    covered: dict[int, set[int]] = defaultdict(set)
    judged = [Judged(match, _judge(name, match, mine, covered), _facts(match, mine)) for match in given]
    _, whole = _ENOUGH.get(name, _ANY)
    required = [(k, i) for k, i in enumerate(mine) if i.required]
    missed = tuple(i for k, i in required if len(covered[k]) < (i.enough or whole) * len(_core(i)))
    return PatternScore(tuple(judged), len(required) - len(missed), missed)


def _facts(match: PatternMatch, instances: Sequence[Instance]) -> dict[str, Fact]:
    stated = [i.facts for i in instances if i.facts and _reach(match, i)]
    said = match.details
    return {name: Fact(value, said.get(name)) for facts in stated[:1] for name, value in facts.items()}


def _core(instance: Instance) -> frozenset[int]:
    return instance.values or instance.core


def _reach(match: PatternMatch, instance: Instance) -> set[int]:
    """Return the covered part of the core; for caches, the storages that the match names."""
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


@attrs.frozen
class Tenth:
    """Matches with confidence in one tenth.

    Attributes:
        low: lower bound. count: number of matches. stated: mean confidence. right: share of right matches.
    """

    low: float
    count: int
    stated: float
    right: float


@attrs.define
class Sum:
    """Total scores of many programs."""

    judged: dict[str, list[Judged]] = attrs.field(factory=lambda: defaultdict(list))
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
        """Return the share of right matches of a pattern; None without matches."""
        judged = [j.right for j in self.judged[name] if j.right is not None]
        return sum(judged) / len(judged) if judged else None

    def recall(self, name: str) -> float | None:
        """Return the share of found instances; None without instances."""
        count = self.found[name] + self.missed[name]
        return self.found[name] / count if count else None

    def phase_accuracy(self, *situations: str) -> float | None:
        """Return the share of nodes with a right phase, in all situations or some."""
        return share(pair for s, pairs in self.phases.items() if not situations or s in situations for pair in pairs)

    def facts(self, name: str) -> dict[str, tuple[float | None, float]]:
        """Return for each known fact the share of right values, and the share of matches with a value."""
        found = {}
        for fact in dict.fromkeys(f for judged in self.judged[name] for f in judged.facts):
            answers = [j.facts[fact].right for j in self.judged[name] if fact in j.facts]
            said = [right for right in answers if right is not None]
            found[fact] = (sum(said) / len(said) if said else None, len(said) / len(answers))
        return found

    def kinds(self, name: str) -> dict[str, tuple[int, float | None, float]]:
        """Return for each kind of a pattern the count, precision and recall. A match without the kind counts as a miss."""
        found = {}
        for fact, value in KINDS.get(name, ()):
            known = [judged.facts[fact] for judged in self.judged[name] if fact in judged.facts]
            true, said = [f for f in known if f.true == value], [f for f in known if f.said == value]
            if true:
                label = value if isinstance(value, str) else fact
                hits = sum(f.said == value for f in true)
                found[f"{label}"] = (len(true), hits / len(said) if said else None, hits / len(true))
        return found

    def calibration(self, name: str) -> tuple[Tenth, ...]:
        """Return the calibration of a pattern's matches by tenths of confidence."""
        tenths: dict[int, list[Judged]] = defaultdict(list)
        for judged in self.judged[name]:
            if judged.right is not None:
                tenths[min(int(judged.match.confidence * 10), 9)].append(judged)
        return tuple(_tenth(low / 10, tenths[low]) for low in sorted(tenths))

    def calibration_error(self, *names: str) -> float | None:
        """Return the mean absolute difference of confidence and accuracy over these patterns' matches."""
        tenths = [tenth for name in names or NAMES for tenth in self.calibration(name)]
        count = sum(tenth.count for tenth in tenths)
        return sum(abs(t.stated - t.right) * t.count for t in tenths) / count if count else None

    def at_least(self, confidence: float, *names: str) -> list[bool]:
        """Return for each match of at least this confidence whether it is right."""
        judged = (j for name in names or NAMES for j in self.judged[name])
        return [j.right for j in judged if j.right is not None and j.match.confidence >= confidence]


def _tenth(low: float, judged: Sequence[Judged]) -> Tenth:
    stated = sum(j.match.confidence for j in judged) / len(judged)
    return Tenth(low, len(judged), stated, sum(j.right is True for j in judged) / len(judged))


def least(right: int, count: int) -> float | None:
    """Return the lower bound of Wilson's 95 % interval of a share; None without data."""
    if not count:
        return None
    z, share = 1.959964, right / count
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (share + z * z / (2 * count) - spread) / (1 + z * z / count)


def share(pairs: Iterable[tuple[int, int]]) -> float | None:
    """Return the sum of the first numbers divided by that of the second; None without data."""
    right, count = map(sum, zip(*pairs, strict=True)) if (pairs := list(pairs)) else (0, 0)
    return right / count if count else None
