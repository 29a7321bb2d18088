"""Subgraph substitution: parts of a program replaced by other PyTorch code, the program that results, and two rewrites as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import attrs
import torch

from djinn_core.ir.program import Call, Program
from djinn_core.ir.short_repr import ShortRepr

Compute = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@attrs.frozen
class Substitution:
    """Nodes to remove, and PyTorch code that computes their results.

    The code runs once, on remote tensors. It is recorded in the place of the first of the nodes, so all inputs must exist by then.
    What depends on weights alone is computed once and kept as long as they do not change.

    Attributes:
        nodes: ids of the nodes to remove. Other nodes may use none of their results but the outputs.
        inputs: values that `compute` is given, in order.
        outputs: values that it returns, in order: of the same shape and dtype.
        compute: ordinary PyTorch code without sync points or random numbers. It takes a list of tensors and returns a list of
            new ones, as many as there are `outputs`. Code in `with djinn.planning.group(number):` is meant to run on one
            device, concurrently with other groups: the hint `groups` of the plan has the ids of their nodes.
            `djinn.planning.call_again(node, operands, changed)` repeats the call of a node with other tensors, and with the
            arguments in `changed` by their names.
        relies: nodes that stay, and that the code repeats or was made for: the substitution holds while they are the same.
    """

    nodes: frozenset[int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    compute: Compute = attrs.field(repr=False, eq=False)
    relies: frozenset[int] = frozenset()


@attrs.frozen(eq=False, repr=False)
class Recipe(ShortRepr):
    """Constant folding: values that are computed once from weights and kept until the weights change.

    Attributes:
        program: computes the values; its other results die with it.
        sources: the weights. makes: the values that are kept, under placeholder handles.
    """

    program: Program
    sources: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def identity(self) -> Hashable:
        """Key that is equal for recipes that compute the same from the same weights."""
        numbers: dict[int, int] = {}
        flow = tuple([numbers.setdefault(v, len(numbers)) for v in (*self.program.operands, *self.makes)])
        return self.program.calls, flow, repr(self.program.slots)  # keys treat 1 and 1.0, 0.0 and -0.0 as equal


@attrs.frozen(eq=False, repr=False)
class RewrittenProgram(ShortRepr):
    """A program that does the work of another one in another way.

    Attributes:
        program: values that the original has, too, have the same handles; others are its own and die with it.
        origin: the original.
        slots: for each slot of the program its position in the original's slots, or -1 if it is fixed.
        nodes: for each instruction the original's node that it is or stands for.
        own: instructions whose calls are not the original's.
        relied: nodes of the original with the calls that this holds for, sizes and numbers included.
        recipes: what is computed from weights beforehand, each by itself.
        groups: instructions that are meant to run on one device, each group beside the others.
    """

    program: Program
    origin: Program
    slots: tuple[int, ...]
    nodes: tuple[int, ...]
    own: frozenset[int]
    relied: tuple[tuple[int, Call], ...]
    recipes: tuple[Recipe, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """The original's values by first appearance, then those of the recipes, then the program's own."""
        derived = (value for recipe in self.recipes for value in recipe.makes)
        return tuple(dict.fromkeys((*self.origin.operands, *derived, *self.program.operands)))


@attrs.frozen
class RecipeLocations:
    """Locations of the values of a recipe, in its order: device ids of each value and of its copies."""

    homes: tuple[str, ...]
    copies: tuple[tuple[str, ...], ...]


Derived = Callable[[Recipe], RecipeLocations | None]


def not_derived(recipe: Recipe) -> None:
    """Nothing was derived yet."""
    del recipe


def composed(first: RewrittenProgram, second: RewrittenProgram) -> RewrittenProgram | None:
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


def groups_after(rewritten: RewrittenProgram, before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Its groups of instructions; if it has none, the groups of the original's nodes from before."""
    if rewritten.groups:
        return rewritten.groups
    wanted = [frozenset(group) for group in before]
    return tuple(tuple(i for i, node in enumerate(rewritten.nodes) if node in group) for group in wanted)
