"""The pattern language: terms that describe dataflow between ops, and their constructors (`op`, `through`, ...).

A term is matched backwards from its last op, because an op has few operands and may have many users. Views, casts,
copies and disabled dropout may stand between two ops, unless a term names them. A name without a trailing underscore
also matches the in-place op: `op("relu")` finds `relu_`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.planning.matching.match_result import Match, MatchedNode, Ways

Condition = Callable[[MatchedNode], bool]
_SEEN = 96  # maximum number of sources that one `through` examines
_COMMUTATIVE = frozenset({
    "add", "add_", "bitwise_and", "bitwise_or", "eq", "logical_and", "logical_or", "maximum", "minimum", "mul", "mul_", "ne",
})  # fmt: skip


class Term(ABC):
    """A condition on a source. `a >> b` feeds `a` into `b`, `a | b` matches either, `a["x"]` names the source."""

    @abstractmethod
    def ways(self, match: Match, source: int) -> Ways:
        """Yield `match` with added nodes and names, once for each way in which `source` matches this term."""

    @property
    @abstractmethod
    def ends(self) -> frozenset[str] | None:
        """Return the ops that can end a match, or None if any op can."""

    def __rshift__(self, after: Term) -> Term:
        return after.fed_by(self)

    def __or__(self, other: Term) -> Term:
        return Either((self, other))

    def __getitem__(self, name: str) -> Term:
        return Named(self, name)

    __iter__ = None  # otherwise Python iterates with the names 0, 1, 2 and so on forever

    def where(self, *conditions: Condition) -> Term:
        """Restrict this term to nodes for which all `conditions` hold."""
        return Where(self, conditions)

    def fed_by(self, before: Term) -> Term:
        """Return this term, fed by `before`.

        Raises:
            TypeError: the term has no operands.
        """
        raise TypeError(f"nothing can flow into a {type(self).__name__}: put no {type(before).__name__} before it")


@attrs.frozen(eq=False)
class Op(Term):
    """A term for one op: its possible names, and the terms of its operands.

    Attributes:
        names: ops, as in `Node.operation`.
        operands: terms of its tensor operands, in order. Further operands are not checked. For commutative ops such as
            `add` and `mul`, the order does not matter.
        feeds: terms that match any operand.
    """

    names: frozenset[str]
    operands: tuple[Term, ...] = ()
    feeds: tuple[Term, ...] = ()

    def __call__(self, /, *operands: Term) -> Op:
        """Return this op with these operands, in order."""
        return attrs.evolve(self, operands=operands)

    @property
    def ends(self) -> frozenset[str]:
        return self.names

    def fed_by(self, before: Term) -> Op:
        return attrs.evolve(self, feeds=(*self.feeds, before))

    def ways(self, match: Match, source: int) -> Ways:
        flow = match.graph.flow
        skipped: list[int] = []
        while source >= 0:
            node = match.graph.nodes[source]
            if node.operation in self.names:
                yield from self._match_operands(match.with_nodes(*skipped, source), node)
                return
            if not flow.pass_through[source]:
                return
            skipped.append(source)
            source = next(iter(flow.sources[source]), -1)

    def _match_operands(self, match: Match, node: Node) -> Ways:
        for way in self._match_in_order(match, node):
            yield from self._match_feeds(way, node, self.feeds)

    def _match_in_order(self, match: Match, node: Node) -> Ways:
        if not self.operands:
            yield match
            return
        sources = match.graph.flow.sources[node.id]
        if len(sources) < len(self.operands):
            return
        yield from _match_each(match, self.operands, sources)
        if node.operation in _COMMUTATIVE and len(self.operands) == len(sources) == 2:
            yield from _match_each(match, self.operands, sources[::-1])

    def _match_feeds(self, match: Match, node: Node, feeds: tuple[Term, ...]) -> Ways:
        if not feeds:
            yield match
            return
        for source in dict.fromkeys(match.graph.flow.sources[node.id]):
            for way in feeds[0].ways(match, source):
                yield from self._match_feeds(way, node, feeds[1:])


def _match_each(match: Match, terms: tuple[Term, ...], sources: tuple[int, ...]) -> Ways:
    if not terms:
        yield match
        return
    for way in terms[0].ways(match, sources[0]):
        yield from _match_each(way, terms[1:], sources[1:])


@attrs.frozen(eq=False)
class Either(Term):
    """Term that matches if one of several terms matches. The first term that matches is used."""

    terms: tuple[Term, ...]

    @property
    def ends(self) -> frozenset[str] | None:
        ends = [term.ends for term in self.terms]
        return None if any(e is None for e in ends) else frozenset(itertools.chain(*filter(None, ends)))

    def __or__(self, other: Term) -> Either:
        return Either((*self.terms, other))

    def fed_by(self, before: Term) -> Either:
        return Either(tuple(term.fed_by(before) for term in self.terms))

    def ways(self, match: Match, source: int) -> Ways:
        for term in self.terms:
            yield from term.ways(match, source)


@attrs.frozen(eq=False)
class Named(Term):
    """A named term. Two terms of one name must match the same source."""

    term: Term
    name: str

    @property
    def ends(self) -> frozenset[str] | None:
        return self.term.ends

    def fed_by(self, before: Term) -> Named:
        return Named(self.term.fed_by(before), self.name)

    def ways(self, match: Match, source: int) -> Ways:
        end = _end_of(match.graph, self.term, source)
        for way in self.term.ways(match, source):
            named_match = way.with_name(self.name, end)
            if named_match is not None:
                yield named_match


@attrs.frozen(eq=False)
class Where(Term):
    """A term with conditions on its node."""

    term: Term
    conditions: tuple[Condition, ...]

    @property
    def ends(self) -> frozenset[str] | None:
        return self.term.ends

    def fed_by(self, before: Term) -> Where:
        return Where(self.term.fed_by(before), self.conditions)

    def ways(self, match: Match, source: int) -> Ways:
        end = _end_of(match.graph, self.term, source)
        if end < 0 or not _may_end(self.term, match.graph.nodes[end]):
            return
        matched_node = MatchedNode(match.graph, match.graph.nodes[end])
        if all(condition(matched_node) for condition in self.conditions):
            yield from self.term.ways(match, source)


@attrs.frozen(eq=False)
class Anything(Term):
    """Term that matches any source."""

    @property
    def ends(self) -> None:
        return None

    def ways(self, match: Match, source: int) -> Ways:
        del source
        yield match


@attrs.frozen(eq=False)
class Through(Term):
    """A chain of ops between two terms. Each op takes the previous result as any operand. Shorter chains come first.

    Attributes:
        names: ops that the chain may contain.
        limit: maximum length of the chain.
        widest: True to follow only the largest operands of each op, for example scores instead of masks.
        condition: condition on each op.
        before: the term in front of the chain; None until `>>` joins them.
    """

    names: frozenset[str]
    limit: int
    widest: bool = False
    condition: Condition | None = None
    before: Term | None = None

    @property
    def ends(self) -> frozenset[str] | None:
        last = self.before.ends if self.before is not None else None
        return None if last is None else last | self.names

    def fed_by(self, before: Term) -> Through:
        return attrs.evolve(self, before=before if self.before is None else before >> self.before)

    def ways(self, match: Match, source: int) -> Ways:
        if self.before is None:
            raise TypeError("through(...) stands between two terms: a >> through(...) >> b")
        graph, seen = match.graph, {source}
        queue: deque[tuple[int, tuple[int, ...]]] = deque([(source, ())])
        while queue:
            at, skipped = queue.popleft()
            yield from self.before.ways(match.with_nodes(*skipped), at)
            at = graph.flow.skip_pass_through(at)
            if len(skipped) >= self.limit or at < 0 or not self._may_pass(graph, graph.nodes[at]):
                continue
            for operand in self._operands_to_follow(graph, graph.nodes[at]):
                if operand not in seen and len(seen) < _SEEN:
                    seen.add(operand)
                    queue.append((operand, (*skipped, at)))

    def _may_pass(self, graph: Graph, node: Node) -> bool:
        return node.operation in self.names and (self.condition is None or self.condition(MatchedNode(graph, node)))

    def _operands_to_follow(self, graph: Graph, node: Node) -> list[int]:
        sources = graph.flow.sources[node.id]
        if not self.widest:
            return list(sources)
        sizes = [graph.meta(v).numel for v in node.inputs]
        return [s for s, size in zip(sources, sizes, strict=True) if size == max(sizes)]


def _may_end(term: Term, node: Node) -> bool:
    return term.ends is None or node.operation in term.ends


def _end_of(graph: Graph, term: Term, source: int) -> int:
    """Return `source`, or an earlier source behind pass-through ops, at which `term` may end."""
    flow, ends = graph.flow, term.ends
    while ends is not None and source >= 0 and flow.pass_through[source] and graph.nodes[source].operation not in ends:
        source = next(iter(flow.sources[source]), -1)
    return flow.skip_pass_through(source) if ends is None else source


def names_of(operations: Iterable[str]) -> frozenset[str]:
    """Return the names of ops and of their in-place forms."""
    names = frozenset(operations)
    return names | {f"{name}_" for name in names if not name.endswith("_")}


def has_conditions(term: object) -> bool:
    """Return True if a term contains a condition."""
    if isinstance(term, tuple):
        return any(has_conditions(t) for t in term)
    if not isinstance(term, Term):
        return False
    if isinstance(term, Where) or (isinstance(term, Through) and term.condition is not None):
        return True
    return any(has_conditions(field) for field in attrs.astuple(term, recurse=False))  # type: ignore[arg-type] # every term is an attrs class


# --- constructors --------------------------------------------------------------------------------------------


def op(*operations: str | Iterable[str]) -> Op:
    """Return a term for one op of these names (or sets of names), such as `op("gelu", "relu")` or `op(MATRIX_PRODUCT)`.

    Raises:
        TypeError: an argument is a term, not a name.
    """
    if any(isinstance(argument, Term) for argument in operations):
        raise TypeError('op() takes names of ops; what flows into an op is written before it: op("relu") >> op("exp")')
    names = [name for argument in operations for name in ([argument] if isinstance(argument, str) else argument)]
    return Op(names_of(names))


def through(
    *operations: str | Iterable[str], limit: int = 4, widest: bool = False, where: Condition | None = None
) -> Through:
    """Return a term for a chain of at most `limit` of these ops, possibly empty.

    Args:
        operations: names of ops, or sets of names.
        limit: maximum length of the chain.
        widest: follow only the largest operands of each op. Masks that are smaller than scores are not followed.
        where: a condition on each op.

    Example: `op("mm") >> through("mul", "add") >> op("_softmax")`.
    """
    return Through(op(*operations).names, limit, widest, where)


def anything(name: str | None = None) -> Term:
    """Return a term for any source. All terms of one name must match the same source."""
    return Anything() if name is None else Anything()[name]
