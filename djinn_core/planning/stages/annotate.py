"""Stage 2: annotate the graph with workload type, phases, residency, modality and pattern matches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph
from djinn_core.ir.op_families import role_of
from djinn_core.ir.profile import DataResidency, Lineage, Modality, PatternMatch, Tier, WorkloadProfile
from djinn_core.planning.stages.annotating.evidence import Evidence
from djinn_core.planning.stages.annotating.inputs import Inputs, inputs_of
from djinn_core.planning.stages.annotating.kinds import modalities_in
from djinn_core.planning.stages.annotating.lineage import lineage_of, modalities_of
from djinn_core.planning.stages.annotating.phases import phases_of
from djinn_core.planning.stages.annotating.residency import (
    residency_of_counters,
    residency_of_gradients,
    residency_of_inputs,
)
from djinn_core.planning.stages.annotating.states import NO_STATES, States, states_in
from djinn_core.planning.stages.annotating.training import TrainingParts, training_in
from djinn_core.planning.stages.annotating.workload_type import ALL_TIERS, judge
from djinn_core.planning.stages.attribution import warn_skipped
from djinn_core.planning.stages.verify import check_match

Known = Mapping[int, DataResidency | Modality]
NOTHING_KNOWN: Mapping[int, DataResidency | Modality] = {}


def annotate(
    graph: Graph,
    patterns: Sequence[Pattern],
    *,
    known: Known = NOTHING_KNOWN,
    tiers: frozenset[Tier] = ALL_TIERS,
) -> WorkloadProfile:
    """Return the workload profile of `graph`: run every pattern, and classify the graph as a whole and node by node.

    Args:
        graph: the graph.
        patterns: the patterns to run. A pattern that raises or returns an invalid match is skipped, with a warning.
        known: facts about inputs from earlier programs: the lifetime of the value, or the kind of data of an
            activation.
        tiers: the tiers that may judge the workload type. Phases and residency always come from the structure.
    """
    matches, skipped = _all_matches(graph, patterns)
    known_residency = {value: fact for value, fact in known.items() if isinstance(fact, DataResidency)}
    earlier = {value: fact for value, fact in known.items() if isinstance(fact, Modality)}
    inputs = inputs_of(graph)
    training = training_in(graph, inputs, known_residency)
    states = NO_STATES if training else states_in(graph, inputs, known_residency)
    residency = _residency(graph, inputs, training, states, matches, known_residency)
    if earlier:
        inputs = attrs.evolve(inputs, earlier=earlier)
    bits = lineage_of(graph, inputs, residency)
    modalities = modalities_of(graph, bits) if earlier else modalities_in(graph, bits)
    evidence = Evidence(graph, matches, inputs, training, states, modalities)
    judgement = judge(evidence, tiers)
    return WorkloadProfile(
        workload=judgement.workload,
        phases=phases_of(evidence, judgement.workload),
        modalities=modalities,
        residency=residency,
        roles=_roles(graph, matches),
        patterns=matches,
        reasons=(judgement.reason, *skipped),
        lineage=tuple(map(_flags, bits)),
    )


def _all_matches(graph: Graph, patterns: Sequence[Pattern]) -> tuple[tuple[PatternMatch, ...], list[str]]:
    """Return the matches of all patterns, the most confident first, and sentences about the patterns that failed."""
    matches: list[PatternMatch] = []
    skipped: list[str] = []
    for pattern in patterns:
        try:
            matches += _matches(graph, pattern)
        except Exception as error:
            skipped.append(warn_skipped("pattern", pattern, error, "its matches are ignored for this graph", graph))
    return tuple(sorted(matches, key=lambda m: (-m.confidence, m.nodes, m.pattern))), skipped


def _matches(graph: Graph, pattern: Pattern) -> Iterable[PatternMatch]:
    ids = sorted({i for operation in pattern.operations for i in graph.by_op.get(operation, ())})
    if not ids:
        return []
    matches = list(pattern.match(graph, [graph.nodes[i] for i in ids]))  # a generator raises only when it is iterated
    for match in matches:
        check_match(graph, match)
    return matches


def _residency(
    graph: Graph,
    inputs: Inputs,
    training: TrainingParts,
    states: States,
    matches: Sequence[PatternMatch],
    known_residency: Mapping[int, DataResidency],
) -> dict[int, DataResidency]:
    residency = residency_of_inputs(graph, inputs, training, known_residency)
    if training:
        residency.update(residency_of_gradients(graph, residency, training))
    residency.update(dict.fromkeys(states.values, DataResidency.STATEFUL_KV_CACHE))
    for match in reversed(matches):  # the surest last, so that it overwrites the others
        residency.update(match.residency)
    residency.update(residency_of_counters(graph, residency))
    return residency


def _roles(graph: Graph, matches: Sequence[PatternMatch]) -> dict[int, str]:
    roles = {node.id: role for node in graph.nodes if (role := role_of(node)) is not None}
    for match in reversed(matches):
        roles.update(dict.fromkeys(match.nodes, match.pattern))
    return roles


_known_flags: dict[int, Lineage] = {}


def _flags(bits: int) -> Lineage:
    """Return these bits as flags. A cache makes this faster than a conversion."""
    flags = _known_flags.get(bits)
    return flags if flags is not None else _known_flags.setdefault(bits, Lineage(bits))
