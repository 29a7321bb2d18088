"""Compute several placements and take the best: on one device, near the inputs, spread over devices, or in segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from djinn.errors import DoesNotFit
from djinn.hooks import PlacementContext, PlacementPolicy
from djinn.planning import HintUse, Placement, PlacementDecision, homes_of_values, storage_of
from djinn_costs.cost_based.grouped import for_branches, for_groups
from djinn_costs.cost_based.hint_uses import hint_uses
from djinn_costs.cost_based.listing import PlacedUnits
from djinn_costs.cost_based.options import Option, Options
from djinn_costs.cost_based.successive import for_successive


class CostBased(PlacementPolicy):
    """Placement policy that minimises the predicted time.

    It uses one device unless several devices save time or memory.
    """

    name = "cost_based"
    preference = 1  # spreads programs that gain from several devices, and keeps all others on one
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """Return a device and a reason for each node, by predicted times, sizes and locations.

        Raises:
            DoesNotFit: no device can run the program, or the devices together have too little memory.
        """
        options = Options(context)
        return _placement(context, options, _best(options), self.name)


def _best(options: Options) -> Option:
    """Return the best placement. It uses several devices only if that saves enough time or one lacks the memory."""
    if (successive := for_successive(options)) is not None:
        return successive
    if (grouped := for_groups(options)) is not None:
        return grouped
    in_place, spread = options.undivided(), options.spread()
    if (divided := for_branches(options)) is not None and (
        spread is None or divided.placed_units.seconds <= spread.placed_units.seconds
    ):
        before = in_place.placed_units.seconds if in_place is not None else None
        use = HintUse("branches", "each branch runs on a device", before, divided.placed_units.seconds)
        spread = attrs.evolve(divided, hint_uses=(use,))
    if in_place is None and spread is None:
        raise DoesNotFit(options.why_nothing_fits())
    if in_place is None or (
        spread is not None
        and spread.placed_units.seconds < options.max_time_ratio_of_division * in_place.placed_units.seconds
    ):
        assert spread is not None
        return attrs.evolve(spread, rejected=in_place)
    return attrs.evolve(in_place, rejected=spread)


def _placement(context: PlacementContext, options: Options, best: Option, policy: str) -> Placement:
    graph, work, placed_units = context.graph, options.work, best.placed_units
    homes = dict(placed_units.homes)
    main = placed_units.device_of_unit[0] if placed_units.device_of_unit else options.devices[0].id
    for value in graph.inputs:
        homes.setdefault(work.blocks.block(value), main)
    places: dict[int, tuple[str, str]] = {}
    for index, unit in enumerate(work.units):
        places.update(dict.fromkeys(unit.nodes, (placed_units.device_of_unit[index], best.reason(index))))
    for node in work.view_nodes:
        block = work.blocks.node(node)
        places[node] = (main if block is None else homes[block], "the value that it views is on this device")
    nodes = context.plan.nodes
    decisions = tuple([PlacementDecision(node, *places[node]) for node in nodes])
    values = homes_of_values(graph, nodes, work.blocks, homes)
    uses = hint_uses(context, options, best)
    return Placement(decisions, values, policy, _copies(context, placed_units, values), uses=uses)


def _copies(context: PlacementContext, placed_units: PlacedUnits, homes: dict[int, str]) -> dict[int, tuple[str, ...]]:
    """Return for each copied weight the devices with a copy, except its home. Copies by this program are included."""
    copies: dict[int, tuple[str, ...]] = {}
    for value in context.graph.inputs if placed_units.copies or context.copies else ():
        holders: Iterable[str] = (*context.copies.get(value, ()), *placed_units.copies.get(storage_of(value), ()))
        other_devices: Sequence[str] = [d for d in dict.fromkeys(holders) if d != homes[value]]
        if other_devices:
            copies[value] = tuple(other_devices)
    return copies
