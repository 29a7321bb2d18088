"""Report how the policy used each kind of hint, for `djinn explain`."""

from __future__ import annotations

from djinn.hooks import PlacementContext
from djinn.planning import HintUse
from djinn_costs.cost_based.options import Option, Options


def hint_uses(context: PlacementContext, options: Options, best: Option) -> tuple[HintUse, ...]:
    """Return how the policy used each kind of hint in the plan."""
    use_of_hint = {use.hint: use for use in best.hint_uses}
    notes = {"colocate": _colocated(context, best), "tables": _tables(options, best)}
    few = f"{len(best.placed_units.devices)} of {len(options.devices)} devices runs the program"
    for name in ("groups", "branches", "pipeline"):
        notes[name] = f"not used: {few}" if len(best.placed_units.devices) == 1 else "not used: it is not faster"
    hints = context.plan.hints
    return tuple(
        use_of_hint.get(name) or HintUse(name, decision) for name, decision in notes.items() if hints.get(name)
    )


def _colocated(context: PlacementContext, best: Option) -> str:
    groups = len(context.plan.hints.get("colocate", ()))
    if len(best.placed_units.devices) == 1:
        return f"{groups} groups of values are on the one device in use"
    return f"each of {groups} groups of values is on one device"


def _tables(options: Options, best: Option) -> str:
    tables, work = options.work.tables, options.work
    if not tables:
        return "not used: there is one device, or each table is smaller than a hundredth of a device"
    look_ups = {
        best.placed_units.device_of_unit[i] for i, unit in enumerate(work.units) if not unit.reads.isdisjoint(tables)
    }
    dense = {
        best.placed_units.device_of_unit[i] for i, unit in enumerate(work.units) if unit.reads.isdisjoint(tables)
    } - look_ups
    size = sum(work.sizes[s] for s in tables)
    if not dense:
        return f"{len(tables)} tables of {size:,} bytes are on devices of the dense work"
    return f"{len(tables)} tables of {size:,} bytes stay apart from the dense work: ids go to them, and rows come back"
