"""Stage 2: what the program is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph
from djinn_core.ir.profile import DataResidency, PatternMatch, WorkloadProfile
from djinn_core.stages.attribution import warn_skipped
from djinn_core.stages.classify import classify
from djinn_core.ir.families import role_of
from djinn_core.stages.residency import residency_of
from djinn_core.stages.verify import check_match


def annotate(graph: Graph, patterns: Sequence[Pattern]) -> WorkloadProfile:
    """Run every pattern over `graph` and say what it is, node by node and as a whole.

    A pattern that raises or returns a match that does not fit the graph is skipped, with a warning that names it.
    """
    found: list[PatternMatch] = []
    skipped: list[str] = []
    for pattern in patterns:
        try:
            found += _matches(graph, pattern)
        except Exception as error:
            skipped.append(warn_skipped("pattern", pattern, error, "its matches are left out for this graph"))
    matches = tuple(sorted(found, key=lambda m: (-m.confidence, m.nodes, m.pattern)))
    verdict = classify(graph, matches)
    return WorkloadProfile(
        workload=verdict.workload,
        phases=verdict.phases,
        modalities=verdict.modalities,
        residency=_residency(graph, matches, verdict.training),
        roles=_roles(graph, matches),
        patterns=matches,
        reasons=(*verdict.reasons, *skipped),
    )


def _matches(graph: Graph, pattern: Pattern) -> Iterable[PatternMatch]:
    ids = sorted({i for operation in pattern.operations for i in graph.by_op.get(operation, ())})
    if not ids:
        return []
    matches = list(pattern.match(graph, [graph.nodes[i] for i in ids]))
    for match in matches:
        check_match(graph, match)
    return matches


def _residency(graph: Graph, matches: Sequence[PatternMatch], training: bool) -> dict[int, DataResidency]:
    residency = residency_of(graph, training)
    for match in reversed(matches):  # the surest last, so that it counts
        residency.update(match.residency)
    return residency


def _roles(graph: Graph, matches: Sequence[PatternMatch]) -> dict[int, str]:
    roles = {node.id: role for node in graph.nodes if (role := role_of(node)) is not None}
    for match in reversed(matches):
        roles.update(dict.fromkeys(match.nodes, match.pattern))
    return roles
