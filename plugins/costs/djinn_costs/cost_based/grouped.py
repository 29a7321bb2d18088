"""Place independent groups and branches of a program on separate devices."""

from __future__ import annotations

import math

import attrs

from djinn.planning import HintUse
from djinn_costs.cost_based.options import Option, Options, device_to_follow
from djinn_costs.cost_based.units import beside


def for_groups(options: Options) -> Option | None:
    """Return a placement with a separate device for each group of an optimization.

    The last group runs on the device with most of the inputs. Return None if the plan has no groups, if devices or
    memory do not suffice, or if the division saves less than the required margin.
    """
    if not options.context.plan.hints.get("groups"):
        return None
    undivided, divided = options.undivided(), _on_several_devices(options, "group", options.main())
    if divided is None or (
        undivided is not None
        and divided.placed_units.seconds > options.max_time_ratio_of_division * undivided.placed_units.seconds
    ):
        return None
    before = undivided.placed_units.seconds if undivided is not None else None
    use = HintUse("groups", "each group runs on a device", before, divided.placed_units.seconds)
    return attrs.evolve(divided, rejected=undivided, hint_uses=(use,))


def for_branches(options: Options) -> Option | None:
    """Return a placement with a separate device for each branch of a pattern.

    The longest branch runs on the device with most of the inputs. Return None if the plan has groups or no branches,
    or if devices or memory do not suffice.
    """
    if options.context.plan.hints.get("groups") or not options.context.plan.hints.get("branches"):
        return None
    return _on_several_devices(options, "branch", None)


def _on_several_devices(options: Options, group_name: str, new_input_device: str | None) -> Option | None:
    count, units = len(beside(options.context)), options.work.units
    if count > len(options.devices):
        return None
    main = options.main()
    seconds = [math.fsum(min(u.seconds) for u in units if u.group == n) for n in range(count)]
    order = range(count) if new_input_device is not None else sorted(range(count), key=seconds.__getitem__)
    other_devices = [d for d in options.holding_most(len(options.devices)) if d != main][: count - 1]
    device_of_group = dict(zip(order, (*other_devices, main), strict=True))
    placed_units = options.place_units(
        lambda _, unit, listing: [
            device_of_group[unit.group] if unit.group >= 0 else device_to_follow(unit, listing) or main
        ],
        new_input_device=new_input_device,  # with copies on other devices: later programs run there
    )
    if placed_units is None:
        return None

    def why(index: int) -> str:
        group = units[index].group
        return (
            f"{group_name} {group + 1} of {count} that run at the same time"
            if group >= 0
            else "its operands are on this device"
        )

    return Option(placed_units, why)
