"""Optimization plans: the nodes that remain to run after rewrites, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs.validators import deep_iterable, instance_of

from djinn_core.errors import InvalidStage
from djinn_core.ir.checked_fields import IS_SET, mapping_of, tuple_of
from djinn_core.ir.placement import PlacementDecision
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.substitution import Substitution


@attrs.frozen
class Rewrite:
    """A change to the program, as data, so that the driver can apply, verify and undo it.

    Attributes:
        drop: nodes that need not run.
        replace: substitute of each replaced value. The node that computes the replaced value is dropped.
        hints: facts for placement and scheduling, such as `{"colocate": [(...), ...]}` with value ids.
        equal_slots: pairs of positions in the program's slot list; the rewrite holds only while both are equal.
            Programs of one template differ in slots, so a rewrite that compared scalars must list the
            comparisons here.
        substitutions: parts of the program to replace by other computation. They are recorded after all optimizations.
            The resulting program is planned instead of this one.
        replicas: nodes that also run on a further device, with reasons. Only the second pass, after placement, may
            propose them. They write nothing, draw no random numbers, have no effect and read only the elements of
            their operands (`djinn_core.ir.replicas.repeatable(node)`).
        by_turn: True if the rewrite depends on `Stream.turn`, the device with the least work. The program then has one
            plan per such device.
    """

    drop: frozenset[int] = attrs.field(default=frozenset(), validator=deep_iterable(instance_of(int), IS_SET))
    replace: Mapping[int, int] = attrs.field(factory=dict, validator=mapping_of(int, int))
    hints: Mapping[str, Any] = attrs.field(factory=dict, validator=mapping_of(str))
    equal_slots: tuple[tuple[int, int], ...] = attrs.field(default=(), validator=tuple_of(tuple))
    substitutions: tuple[Substitution, ...] = attrs.field(default=(), validator=tuple_of(Substitution))
    replicas: tuple[PlacementDecision, ...] = attrs.field(default=(), validator=tuple_of(PlacementDecision))
    by_turn: bool = False

    def __bool__(self) -> bool:
        return bool(self.drop or self.replace or self.hints or self.substitutions or self.replicas)


@attrs.frozen
class OptimizationResult:
    """Outcome of one optimization: its rewrite, or the reason why it did nothing.

    Attributes:
        optimization: name of the optimization.
        applied: True if there is a rewrite to apply.
        reason: why the program was rewritten, or why not.
        rewrite: the change to the program.
        seconds_before: predicted time of the program before the rewrite. The core sets it.
        seconds_after: predicted time after the rewrite. The core sets it.
    """

    optimization: str = attrs.field(validator=instance_of(str))
    applied: bool
    reason: str = attrs.field(validator=instance_of(str))
    rewrite: Rewrite = attrs.field(default=Rewrite(), validator=instance_of(Rewrite))
    seconds_before: float = 0.0
    seconds_after: float = 0.0


@attrs.frozen(repr=False)
class OptimizationPlan(ShortRepr):
    """Result of the stage `optimize`: the nodes that remain to run.

    Attributes:
        nodes: ids of the nodes that run, in order.
        replace: final substitutes of replaced values: one lookup is enough.
        results: outcome of each optimization, in execution order.
        hints: hints of all applied rewrites and of all patterns, by name.
        equal_slots: conditions on the slots under which the plan holds.
        replicas: nodes that also run on a further device.
    """

    nodes: tuple[int, ...]
    replace: Mapping[int, int] = attrs.field(factory=dict)
    results: tuple[OptimizationResult, ...] = ()
    hints: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    equal_slots: tuple[tuple[int, int], ...] = ()
    replicas: tuple[PlacementDecision, ...] = ()

    @property
    def substituted_nodes(self) -> frozenset[int]:
        """Nodes that substitutions replace. Optimizations cannot share such nodes."""
        return frozenset().union(*(s.nodes for result in self.results for s in result.rewrite.substitutions))

    @property
    def by_turn(self) -> bool:
        """True if an applied rewrite depends on `Stream.turn`: the program then has one plan per device."""
        return any(result.rewrite.by_turn for result in self.results if result.applied)


def resolve_chains(replace: Mapping[int, int]) -> dict[int, int]:
    """Return `replace` with every chain of substitutes followed to its end.

    Raises:
        InvalidStage: substitutes form a cycle.
    """
    ends: dict[int, int] = {}
    for value in replace:
        end, hops = value, 0
        while end in replace and hops <= len(replace):
            end, hops = ends.get(end, replace[end]), hops + 1
        ends[value] = end
        if end in replace:
            raise InvalidStage(f"value {value} is part of a cycle of replacements")
    return ends
