"""The words that terms are written with."""

from __future__ import annotations

from collections.abc import Iterable

from djinn_core.matching.path_term import Anything, Maybe, Through
from djinn_core.matching.terms import Op, Term, names_of


def op(*operations: str | Iterable[str]) -> Op:
    """One op of these names (or sets of names), such as `op("gelu", "relu")` or `op(MATRIX_PRODUCT)`."""
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
