"""Groups of nodes that an optimization has made to run beside each other: each on a device of its own."""

from __future__ import annotations

import attrs

from djinn_costs.cost_based.options import Option, Options, followed


def for_groups(options: Options) -> Option | None:
    """Each group on a device, the last one where most of the inputs live; None if there are none, or it is not faster."""
    groups = options.context.plan.hints.get("groups", ())
    if not groups or len(groups) > len(options.devices):
        return None
    main = options.main()
    where = [*[d for d in options.holding_most(len(options.devices)) if d != main][: len(groups) - 1], main]
    listed = options.listed(
        lambda _, unit, listing: [where[unit.group] if unit.group >= 0 else followed(unit, listing) or main],
        fresh=main,  # with copies elsewhere: what comes after this program runs there
    )
    alone = options.in_place()
    if listed is None or (alone is not None and listed.seconds > options.pays * alone.listed.seconds):
        return None
    units, count = options.work.units, len(groups)

    def why(index: int) -> str:
        group = units[index].group
        return f"group {group + 1} of {count} that run beside each other" if group >= 0 else "its operands are there"

    return attrs.evolve(Option(listed, why), instead=alone)
