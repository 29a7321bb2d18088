"""Composition of two rewrites of a program into one."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_core.ir.substitution import Rewritten


def composed(first: Rewritten, second: Rewritten) -> Rewritten | None:
    """The rewrite `second` of the program of `first`, expressed as a rewrite of the original of `first`.

    None if what `second` derives from weights starts from what `first` derives: recipes know nothing of each other.
    """
    derived = {v for recipe in first.recipes for v in recipe.makes}
    if any(derived.intersection(recipe.sources) for recipe in second.recipes):
        return None
    own = {i for i, node in enumerate(second.nodes) if i in second.own or node in first.own}
    calls = first.origin.calls
    relied = {**dict(first.relied), **{n: calls[n] for n in (first.nodes[node] for node, _ in second.relied)}}
    return attrs.evolve(
        second,
        origin=first.origin,
        slots=tuple(-1 if p < 0 else first.slots[p] for p in second.slots),
        nodes=tuple(first.nodes[node] for node in second.nodes),
        own=frozenset(own),
        relied=tuple(sorted(relied.items(), key=lambda pair: pair[0])),
        recipes=(*first.recipes, *second.recipes),
    )


def groups_after(rewritten: Rewritten, before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Its groups of instructions; where it has none, those from before, of nodes of the original."""
    if rewritten.groups:
        return rewritten.groups
    wanted = [frozenset(group) for group in before]
    return tuple(tuple(i for i, node in enumerate(rewritten.nodes) if node in group) for group in wanted)
