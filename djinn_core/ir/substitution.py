"""Subgraph substitution: replace parts of a program by other PyTorch code, and compose two rewrites."""

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

    The code runs once, on remote tensors. The recorded code replaces the first of the nodes, so all inputs must exist
    before it. Values that depend on weights alone are computed once and cached until the weights change.

    Attributes:
        nodes: ids of the nodes to remove. Other nodes may use only the outputs.
        inputs: values that `compute` receives, in order.
        outputs: values that `compute` returns, in order, with the same shapes and dtypes.
        compute: ordinary PyTorch code without sync points or random numbers. It takes a list of tensors and returns a
            list of new tensors, one for each value in `outputs`. Code in `with djinn.planning.group(number):`
            should run on one device, concurrently with other groups. The hint `groups` of the plan has the node ids of
            each group. `djinn.planning.call_again(node, operands, changed)` repeats the call of a node with other
            tensors, and with the arguments in `changed` by their names.
        relies: remaining nodes on which the code depends. The substitution is valid while they are unchanged.
    """

    nodes: frozenset[int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    compute: Compute = attrs.field(repr=False, eq=False)
    relies: frozenset[int] = frozenset()


@attrs.frozen(eq=False, repr=False)
class Recipe(ShortRepr):
    """Constant folding: a program that computes values once from weights. The values are kept until the weights change.

    Attributes:
        program: the program that computes the values. Its other results are freed when it ends.
        sources: handles of the weights.
        placeholders: placeholder handles of the computed values.
    """

    program: Program
    sources: tuple[int, ...]
    placeholders: tuple[int, ...]

    @property
    def identity(self) -> Hashable:
        """Key that is equal for recipes with the same computation on the same weights."""
        numbers: dict[int, int] = {}
        flow = tuple([numbers.setdefault(v, len(numbers)) for v in (*self.program.operands, *self.placeholders)])
        return self.program.calls, flow, repr(self.program.slots)  # keys treat 1 and 1.0, 0.0 and -0.0 as equal


@attrs.frozen(eq=False, repr=False)
class RewrittenProgram(ShortRepr):
    """A rewritten program, which replaces the original program.

    Attributes:
        program: the new program. It keeps the handles of the original's values, and frees its own values at its end.
        origin: the original program.
        slots: for each slot of the program its position in the original's slots, or -1 if it is fixed.
        nodes: for each instruction, its node in the original.
        own: instructions whose calls are not in the original program.
        required_calls: nodes of the original program on which the rewrite depends. Each has the call, with sizes and scalars,
            for which the rewrite is valid.
        recipes: independent recipes for values that are computed from weights beforehand.
        groups: instructions that should run on one device. Groups may run concurrently.
    """

    program: Program
    origin: Program
    slots: tuple[int, ...]
    nodes: tuple[int, ...]
    own: frozenset[int]
    required_calls: tuple[tuple[int, Call], ...]
    recipes: tuple[Recipe, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """The original's values by first appearance, then the values of the recipes, then the program's own values."""
        recipe_values = (value for recipe in self.recipes for value in recipe.placeholders)
        return tuple(dict.fromkeys((*self.origin.operands, *recipe_values, *self.program.operands)))


@attrs.frozen
class RecipeLocations:
    """Ids of the devices of a recipe's values, and of the devices of their copies, in the recipe's order."""

    homes: tuple[str, ...]
    copies: tuple[tuple[str, ...], ...]


RecipeLookup = Callable[[Recipe], RecipeLocations | None]


def no_recipe_locations(recipe: Recipe) -> None:
    """Return None, as for a recipe that has not run yet. This is the lookup for sessions that have run no recipe."""
    del recipe


def compose(first: RewrittenProgram, second: RewrittenProgram) -> RewrittenProgram | None:
    """Return the rewrite of the original of `first` that applies `first` and then `second`.

    Return None if a recipe of `second` uses values of a recipe of `first`: recipes are independent.
    """
    recipe_values = {v for recipe in first.recipes for v in recipe.placeholders}
    if any(recipe_values.intersection(recipe.sources) for recipe in second.recipes):
        return None
    own = {i for i, node in enumerate(second.nodes) if i in second.own or node in first.own}
    calls = first.origin.calls
    required = {
        **dict(first.required_calls),
        **{n: calls[n] for n in (first.nodes[node] for node, _ in second.required_calls)},
    }
    return attrs.evolve(
        second,
        origin=first.origin,
        slots=tuple(-1 if p < 0 else first.slots[p] for p in second.slots),
        nodes=tuple(first.nodes[node] for node in second.nodes),
        own=frozenset(own),
        required_calls=tuple(sorted(required.items(), key=lambda pair: pair[0])),
        recipes=(*first.recipes, *second.recipes),
    )


def groups_after(rewritten: RewrittenProgram, before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of instructions of a rewritten program.

    `before` has the groups of the original's nodes, which apply if the rewrite has no groups.
    """
    if rewritten.groups:
        return rewritten.groups
    groups = [frozenset(group) for group in before]
    return tuple(tuple(i for i, node in enumerate(rewritten.nodes) if node in group) for group in groups)
