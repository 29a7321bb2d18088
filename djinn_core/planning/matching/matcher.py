"""A term as a pattern that plugins can register."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.patterns import Pattern
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.profile import PatternMatch
from djinn_core.planning.matching.match_result import Match
from djinn_core.planning.matching.terms import Term, has_conditions


@attrs.frozen(eq=False)
class Matcher(Pattern):
    """A pattern that finds a term. `matcher` creates it."""

    name: str
    operations: frozenset[str]
    term: Term
    confidence: float | Callable[[Match], float]
    reason: str | Callable[[Match], str]
    check: Callable[[Match], bool] | None = None
    details: Callable[[Match], Mapping[str, Any]] | None = None
    hints: Callable[[Match], Mapping[str, Any]] | None = None
    tolerates_growth: bool = False

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """Yield the first match that ends in each of `candidates`. Candidates without a match are skipped."""
        for node in candidates:
            match = self.find(graph, node)
            if match is not None:
                yield self._pattern_match(match)

    def find(self, graph: Graph, node: Node) -> Match | None:
        """Return the first match of the term that ends in `node`, or None."""
        for way in self.term.ways(Match(graph, {}, {}), node.id):
            if node.id in way.nodes and (self.check is None or self.check(way)):
                return way
        return None

    def _pattern_match(self, match: Match) -> PatternMatch:
        return PatternMatch(
            pattern=self.name,
            nodes=tuple(sorted(match.nodes)),
            confidence=self.confidence(match) if callable(self.confidence) else self.confidence,
            reason=self.reason(match) if callable(self.reason) else self.reason.format(**match.descriptions()),
            hints=self.hints(match) if self.hints is not None else {},
            details=self.details(match) if self.details is not None else {},
        )


def matcher(
    name: str,
    term: Term,
    *,
    confidence: float | Callable[[Match], float],
    reason: str | Callable[[Match], str],
    check: Callable[[Match], bool] | None = None,
    details: Callable[[Match], Mapping[str, Any]] | None = None,
    hints: Callable[[Match], Mapping[str, Any]] | None = None,
    tolerates_growth: bool = False,
) -> Matcher:
    """Return a pattern that finds `term`.

    Args:
        name: unique among patterns.
        term: the term to find. Its last op selects candidates.
        confidence: a number, or a function of the match. At 0.9, nine of ten matches are right.
        reason: a sentence, or a function of the match. `{x}` in the sentence stands for the op or input that the term
            names `x`.
        check: a condition on the complete match.
        details: facts about a match.
        hints: hints for placement and scheduling.
        tolerates_growth: True if the functions and conditions decide the same for programs that differ in sizes only;
            see `Pattern`. Without functions and conditions it is True.

    Raises:
        ConfigurationError: the term has no last op, so any op could end a match.
    """
    if not term.ends:
        raise ConfigurationError(f"the pattern {name!r} may end with any op: end it with op(...) or linear()")
    decides = any(callable(f) for f in (confidence, reason, check, details, hints)) or has_conditions(term)
    return Matcher(
        name,
        term.ends,
        term,
        confidence,
        reason,
        check,
        details,
        hints,
        tolerates_growth=tolerates_growth or not decides,
    )
