"""The words that terms of the pattern language are written with, and the terms of a path."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from djinn_core.matching.match_result import Found, Ways
from djinn_core.matching.terms import Either, Op, Term, names_of


def op(*operations: str | Iterable[str]) -> Op:
    """One op of these names (or sets of names), such as `op("gelu", "relu")` or `op(MATRIX_PRODUCT)`.

    Raises:
        TypeError: a term is given in place of a name.
    """
    if any(isinstance(given, Term) for given in operations):
        raise TypeError('op() takes names of ops; what flows into an op is written before it: op("relu") >> op("exp")')
    names = [name for given in operations for name in ([given] if isinstance(given, str) else given)]
    return Op(names_of(names))


def through(*operations: str | Iterable[str], limit: int = 4) -> Through:
    """None to `limit` of these ops, one after the other.

    Example: `op("mm") >> through("mul", "add") >> op("_softmax")`.
    """
    return Through(op(*operations).names, limit)


def optional(term: Term) -> Maybe:
    """`term`, or nothing in its place.

    Example: `op("linear") >> optional(op("gelu")) >> op("linear")`.
    """
    return Maybe(term)


def anything(name: str | None = None) -> Term:
    """Any source. With a name: the same wherever that name stands."""
    return Anything() if name is None else Anything()[name]


def outside(name: str | None = None) -> Term:
    """A value from outside the graph, such as a weight or an input."""
    return Anything(outside=True) if name is None else Anything(outside=True)[name]


def computed(name: str | None = None) -> Term:
    """Something that the graph computes."""
    return Anything(inside=True) if name is None else Anything(inside=True)[name]


@attrs.frozen(eq=False)
class Anything(Term):
    """Anything at all; `outside` where it must come from outside the graph, `inside` where it must not."""

    outside: bool = False
    inside: bool = False

    @property
    def ends(self) -> None:
        return None

    def ways(self, found: Found, source: int) -> Ways:
        beyond = found.graph.flow.beyond(source)
        if (beyond < 0 and not self.inside) or (beyond >= 0 and not self.outside):
            yield found


@attrs.frozen(eq=False)
class Through(Term):
    """Any number of ops between two terms, at most `limit`: each takes the last one's result at any operand."""

    names: frozenset[str]
    limit: int
    before: Term | None = None

    @property
    def ends(self) -> frozenset[str] | None:
        last = self.before.ends if self.before is not None else None
        return None if last is None else last | self.names

    def fed_by(self, before: Term) -> Through:
        return attrs.evolve(self, before=before if self.before is None else before >> self.before)

    def ways(self, found: Found, source: int) -> Ways:
        if self.before is None:
            raise TypeError("through(...) stands between two terms: a >> through(...) >> b")
        yield from self._back(found, source, self.before, self.limit)

    def _back(self, found: Found, source: int, before: Term, left: int) -> Ways:
        yield from before.ways(found, source)
        beyond = found.graph.flow.beyond(source)
        if not left or beyond < 0 or found.graph.nodes[beyond].operation not in self.names:
            return
        for operand in dict.fromkeys(found.graph.flow.sources[beyond]):
            yield from self._back(found.covering(beyond), operand, before, left - 1)


@attrs.frozen(eq=False)
class Maybe(Term):
    """A term that may be left out, between two others."""

    term: Term
    before: Term | None = None

    @property
    def ends(self) -> frozenset[str] | None:
        return self._either().ends

    def fed_by(self, before: Term) -> Maybe:
        return attrs.evolve(self, before=before if self.before is None else before >> self.before)

    def ways(self, found: Found, source: int) -> Ways:
        yield from self._either().ways(found, source)

    def _either(self) -> Term:
        if self.before is None:
            raise TypeError("optional(...) stands between two terms: a >> optional(...) >> b")
        return Either((self.term.fed_by(self.before), self.before))
