"""Place a program that runs for successive inputs: devices take whole inputs in turn, or each device runs one stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import attrs

from djinn.planning import HintUse
from djinn_costs.cost_based.listing import RUNS, PlacedUnits
from djinn_costs.cost_based.options import MAX_TIME_RATIO, Option, Options, shown
from djinn_costs.cost_based.parts import stages

LEAST: Final = 2  # minimum number of devices for a division


@attrs.frozen(eq=False)
class Rate:
    """A placement for successive inputs.

    Attributes:
        option: the placement.
        interval: seconds per input.
    """

    option: Option
    interval: float


def for_successive(options: Options) -> Option | None:
    """Return the placement with the highest throughput for successive inputs.

    If no hint announces successive inputs, or if no placement has a higher throughput than one device, return None.
    """
    stage_count = max(options.context.plan.hints.get("pipeline", (0,)), default=0)
    if min(stage_count, len(options.devices)) < LEAST:
        return None
    alone = min(_whole(options).values())
    rates = [rate for rate in (_in_turns(options, stage_count), _in_stages(options, stage_count)) if rate is not None]
    if not rates:
        return None
    chosen = rates[-1] if rates[-1].interval < MAX_TIME_RATIO * rates[0].interval else rates[0]
    # Taking turns compares no prediction of one device with a prediction of another.
    if chosen.interval > (MAX_TIME_RATIO if options.context.stream.turn else options.pays) * alone:
        return None
    rejected = "".join(f", {_named(r)} every {shown(r.interval)}" for r in rates if r is not chosen)
    note = f"; one every {shown(chosen.interval)}{rejected}, on one device every {shown(alone)}"
    why = chosen.option.why
    use = HintUse("pipeline", f"{_named(chosen)}: one input every {shown(chosen.interval)}", alone, chosen.interval)
    return attrs.evolve(chosen.option, why=lambda index: why(index) + note, uses=(use, *chosen.option.uses))


def _named(rate: Rate) -> str:
    return f"in {len(rate.option.listed.devices)} stages" if len(rate.option.listed.devices) > 1 else "in turns"


def _in_turns(options: Options, wanted: int) -> Rate | None:
    """Run the whole program on several devices in turn.

    Only devices about as fast as the device with the weights are used.
    """
    turn, took = options.context.stream.turn, _whole(options)
    if turn not in took:
        return None
    seconds = took[options.main()]
    alike = [d for d in took if took[d] * MAX_TIME_RATIO <= seconds <= took[d] / MAX_TIME_RATIO]
    count = min(wanted, len(alike))
    if turn not in alike or count < LEAST:
        return None
    listing = options.listed(lambda *_: [turn])
    if listing is None or listing.devices != (turn,):
        return None
    if _copying(options, dict.fromkeys(alike, options.work.weights)) / RUNS > took[turn] * (1 - 1 / count):
        return None
    why = f"the turn of this device: each of {count} takes a whole input, with weights of its own"
    return Rate(Option(listing, lambda _: why), took[turn] / count)


def _whole(options: Options) -> dict[str, float]:
    """Return the seconds of the whole program, by device."""
    rows = {row: math.fsum(u.seconds[row] for u in options.work.units) for row in set(options.hardware.row_of.values())}
    return {device.id: rows[options.hardware.row_of[device.id]] for device in options.devices}


def _copying(options: Options, wanted: Mapping[str, Collection[int]]) -> float:
    """Return the seconds to copy the weights to all devices that need them."""
    work, main, missing = options.work, options.main(), 0.0
    for device, weights in wanted.items():
        for storage in weights:
            home = work.homes.get(storage, main)
            if home != device and device not in options.copies.get(storage, ()):
                missing += options.hardware.seconds(home, device, work.sizes[storage])
    return missing


def _in_stages(options: Options, wanted: int) -> Rate | None:
    """Run one stage of the program on each device. The devices are those with most of the inputs."""
    devices = options.holding_most(wanted)
    where = stages(options.work, devices)
    listing = options.listed(lambda index, *_: [where[index]])
    if listing is None:
        return None
    took = Counter[str]()
    for unit, device in zip(options.work.units, listing.where, strict=True):
        took[device] += unit.seconds[options.hardware.row_of[device]]  # type: ignore[assignment] # floats add up as well
    if len(took) < LEAST:
        return None
    notes = {
        d: f"stage {n} of {len(devices)} for successive inputs, {shown(took[d])}" for n, d in enumerate(devices, 1)
    }
    interval = max(*took.values(), _travelling(options, listing))
    read = {
        d: {s for u, at in zip(options.work.units, listing.where, strict=True) if at == d for s in u.reads}
        for d in took
    }
    if _copying(options, {d: read[d] & options.work.weights for d in took}) / RUNS > sum(took.values()) - interval:
        return None
    return Rate(
        Option(listing, lambda index: notes.get(listing.where[index], "the values that it writes are on this device")),
        interval,
    )


def _travelling(options: Options, listed: PlacedUnits) -> float:
    """Return the seconds that the busiest link is used for the values of one input."""
    busy = Counter[tuple[str, str]]()
    for unit, device in zip(options.work.units, listed.where, strict=True):
        for maker, size in unit.needs.items():
            source = listed.where[maker]
            if source != device:
                busy[source, device] += options.hardware.seconds(source, device, size)  # type: ignore[assignment]
    return max(busy.values(), default=0.0)
