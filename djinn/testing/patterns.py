"""Conformance suite for patterns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import PatternMatch
from djinn_core.planning.stages.verify import check_match


class PatternConformance(OnGraphs):
    """Tests that every pattern must pass.

    Subclass this class and define the fixtures `pattern` and `recognised`. `recognised` contains graphs that the
    pattern must match.
    """

    @pytest.fixture
    def pattern(self) -> Pattern:
        """Return the pattern under test."""
        return missing(self, "pattern", "your pattern")  # type: ignore[return-value]

    @pytest.fixture
    def recognised(self) -> Mapping[str, Graph]:
        """Return graphs that the pattern must match, by name."""
        return {}

    def test_pattern_has_every_member(self, pattern: Pattern) -> None:
        """The pattern has all attributes and methods of `Pattern`, and names ops as `Graph.by_op` does."""
        require_protocol(pattern, "patterns")
        assert pattern.operations, "`operations` is empty, so the pattern is never matched"
        odd = [operation for operation in pattern.operations if "::" in operation or "." in operation]
        assert not odd, f"`operations` are names without namespace and overload, such as mm: {odd}"

    def test_matches_cover_nodes_of_the_graph(self, pattern: Pattern, graphs: Mapping[str, Graph]) -> None:
        """Each match names the pattern, has a reason, and covers nodes in order. One of the nodes is a candidate."""
        for name, graph in graphs.items():
            for match in _matches(pattern, graph):
                check_match(graph, match)
                assert match.pattern == pattern.name, f"{name}: the field `pattern` of a match is {match.pattern!r}"
                assert list(match.nodes) == sorted(set(match.nodes)), f"{name}: nodes repeat or are not in order"
                assert match.reason, f"{name}: a match has no reason"
                operations = {graph.nodes[node].operation for node in match.nodes}
                assert operations & pattern.operations, f"{name}: a match has none of {sorted(pattern.operations)}"

    def test_match_is_deterministic(self, pattern: Pattern, graphs: Mapping[str, Graph]) -> None:
        """Two calls of `match` return equal matches, and do not change the graph."""
        for name, graph in graphs.items():
            before = (graph.topology_hash, graph.shape_hash)
            assert _matches(pattern, graph) == _matches(pattern, graph), f"{name}: two calls returned different matches"
            assert (graph.topology_hash, graph.shape_hash) == before, f"{name}: `match` changed the graph"

    def test_no_candidates_give_no_matches(self, pattern: Pattern, graphs: Mapping[str, Graph]) -> None:
        """`match` returns nothing if there are no candidates."""
        for name, graph in graphs.items():
            assert not list(pattern.match(graph, ())), f"{name}: `match` returned a match, but got no candidates"

    def test_expected_graphs_are_matched(self, pattern: Pattern, recognised: Mapping[str, Graph]) -> None:
        """The pattern returns a match for each graph in `recognised`."""
        for name, graph in recognised.items():
            assert _matches(pattern, graph), f"the pattern does not match the graph {name!r}"


def _matches(pattern: Pattern, graph: Graph) -> list[PatternMatch]:
    candidates: list[Node] = [node for node in graph.nodes if node.operation in pattern.operations]
    return list(pattern.match(graph, candidates)) if candidates else []
