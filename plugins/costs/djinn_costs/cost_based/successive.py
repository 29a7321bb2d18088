"""Place a program that runs for successive inputs: devices take whole inputs in turn, or each device runs one stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import attrs

from djinn.planning import HintUse
from djinn_costs.cost_based.listing import RUNS, PlacedUnits
from djinn_costs.cost_based.options import MAX_TIME_RATIO, Option, Options, format_seconds
from djinn_costs.cost_based.parts import stages

MIN_DEVICES: Final = 2  # minimum number of devices for a division


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

    Return None if no hint announces successive inputs, or if no placement has a higher throughput than one device.
    """
    stage_count = max(options.context.plan.hints.get("pipeline", (0,)), default=0)
    if min(stage_count, len(options.devices)) < MIN_DEVICES:
        return None
    alone = min(_program_seconds(options).values())
    rates = [rate for rate in (_in_turns(options, stage_count), _in_stages(options, stage_count)) if rate is not None]
    if not rates:
        return None
    best_rate = rates[-1] if rates[-1].interval < MAX_TIME_RATIO * rates[0].interval else rates[0]
    # Taking turns compares no prediction of one device with a prediction of another.
    if (
        best_rate.interval
        > (MAX_TIME_RATIO if options.context.stream.turn else options.max_time_ratio_of_division) * alone
    ):
        return None
    rejected = "".join(f", {_describe(r)} every {format_seconds(r.interval)}" for r in rates if r is not best_rate)
    note = f"; one every {format_seconds(best_rate.interval)}{rejected}, on one device every {format_seconds(alone)}"
    why = best_rate.option.why
    use = HintUse(
        "pipeline",
        f"{_describe(best_rate)}: one input every {format_seconds(best_rate.interval)}",
        alone,
        best_rate.interval,
    )
    return attrs.evolve(
        best_rate.option, why=lambda index: why(index) + note, hint_uses=(use, *best_rate.option.hint_uses)
    )


def _describe(rate: Rate) -> str:
    return (
        f"in {len(rate.option.placed_units.devices)} stages"
        if len(rate.option.placed_units.devices) > 1
        else "in turns"
    )


def _in_turns(options: Options, device_count: int) -> Rate | None:
    """Return the placement in which devices alternate: each runs the whole program for every n-th input.

    It uses only devices that are about as fast as the device with most of the inputs. Return None if the
    device of this run is not one of them, if they or memory do not suffice, or if copying weights takes too long.
    """
    turn, seconds_by_device = options.context.stream.turn, _program_seconds(options)
    if turn not in seconds_by_device:
        return None
    seconds = seconds_by_device[options.main()]
    similar_devices = [
        d
        for d in seconds_by_device
        if seconds_by_device[d] * MAX_TIME_RATIO <= seconds <= seconds_by_device[d] / MAX_TIME_RATIO
    ]
    count = min(device_count, len(similar_devices))
    if turn not in similar_devices or count < MIN_DEVICES:
        return None
    listing = options.place_units(lambda *_: [turn])
    if listing is None or listing.devices != (turn,):
        return None
    if _copy_seconds(options, dict.fromkeys(similar_devices, options.work.weights)) / RUNS > seconds_by_device[turn] * (
        1 - 1 / count
    ):
        return None
    why = f"the turn of this device: each of {count} takes a whole input, with weights of its own"
    return Rate(Option(listing, lambda _: why), seconds_by_device[turn] / count)


def _program_seconds(options: Options) -> dict[str, float]:
    """Return the seconds of the whole program, by device."""
    rows = {row: math.fsum(u.seconds[row] for u in options.work.units) for row in set(options.hardware.row_of.values())}
    return {device.id: rows[options.hardware.row_of[device.id]] for device in options.devices}


def _copy_seconds(options: Options, device_count: Mapping[str, Collection[int]]) -> float:
    """Return the seconds to copy weights to the devices that lack them. `device_count`: needed weights, by device."""
    work, main, missing = options.work, options.main(), 0.0
    for device, weights in device_count.items():
        for storage in weights:
            home = work.homes.get(storage, main)
            if home != device and device not in options.copies.get(storage, ()):
                missing += options.hardware.seconds(home, device, work.sizes[storage])
    return missing


def _in_stages(options: Options, device_count: int) -> Rate | None:
    """Return the placement in which each of the `device_count` devices with most of the inputs runs one stage.

    Return None if memory does not suffice, fewer than `MIN_DEVICES` have work, or copying weights costs too much time.
    """
    devices = options.holding_most(device_count)
    device_of_unit = stages(options.work, devices)
    listing = options.place_units(lambda index, *_: [device_of_unit[index]])
    if listing is None:
        return None
    seconds_by_device = Counter[str]()
    for unit, device in zip(options.work.units, listing.device_of_unit, strict=True):
        seconds_by_device[device] += unit.seconds[options.hardware.row_of[device]]  # type: ignore[assignment] # floats add up as well
    if len(seconds_by_device) < MIN_DEVICES:
        return None
    notes = {
        d: f"stage {n} of {len(devices)} for successive inputs, {format_seconds(seconds_by_device[d])}"
        for n, d in enumerate(devices, 1)
    }
    interval = max(*seconds_by_device.values(), _busiest_link_seconds(options, listing))
    read_by_device = {
        d: {s for u, at in zip(options.work.units, listing.device_of_unit, strict=True) if at == d for s in u.reads}
        for d in seconds_by_device
    }
    if (
        _copy_seconds(options, {d: read_by_device[d] & options.work.weights for d in seconds_by_device}) / RUNS
        > sum(seconds_by_device.values()) - interval
    ):
        return None
    return Rate(
        Option(
            listing,
            lambda index: notes.get(listing.device_of_unit[index], "the values that it writes are on this device"),
        ),
        interval,
    )


def _busiest_link_seconds(options: Options, listed: PlacedUnits) -> float:
    """Return the seconds for which the busiest link transfers values of one input."""
    busy = Counter[tuple[str, str]]()
    for unit, device in zip(options.work.units, listed.device_of_unit, strict=True):
        for maker, size in unit.bytes_by_unit.items():
            source = listed.device_of_unit[maker]
            if source != device:
                busy[source, device] += options.hardware.seconds(source, device, size)  # type: ignore[assignment]
    return max(busy.values(), default=0.0)
