"""Divide a program that is too large for one device into contiguous segments, for as few devices as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from djinn.planning import DeviceCapabilities
from djinn_costs.cost_based.units import ProgramUnits


def cuts(
    work: ProgramUnits, devices: Sequence[DeviceCapabilities], room: Mapping[str, float]
) -> Iterator[dict[int, str]]:
    """Yield placements, as the device of each unit, with more and more devices.

    Consecutive devices hold consecutive segments. Placed inputs do not move. The size of a segment is proportional to
    the free memory of its device.
    """
    fresh = _fresh_bytes(work)
    total = sum(fresh)
    roomy = sorted(range(len(devices)), key=lambda n: -room.get(devices[n].id, math.inf))
    rooms = [room.get(devices[n].id, float(total)) for n in roomy]
    cumulative = 0.0
    for count, device_room in enumerate(rooms, 1):
        cumulative += device_room
        if cumulative < total:
            continue
        devices_used = [devices[n].id for n in sorted(roomy[:count])]
        rooms_of = [room.get(d, float(total)) for d in devices_used]
        yield _shared_out(work, fresh, devices_used, rooms_of)


def stages(work: ProgramUnits, devices: Sequence[str]) -> dict[int, str]:
    """Return the device of each unit, so that the segments take about equal times. Locations of inputs are ignored."""
    seconds = [min(unit.seconds, default=0.0) for unit in work.units]
    total, at = sum(seconds) or 1.0, 0.0
    where: dict[int, str] = {}
    for index, took in enumerate(seconds):
        turn = int((at + took / 2) / total * len(devices))
        where[index] = devices[min(turn, len(devices) - 1)]
        at += took
    return where


def _shared_out(
    work: ProgramUnits, fresh: Sequence[int], chosen: Sequence[str], rooms: Sequence[float]
) -> dict[int, str]:
    total, capacity = sum(fresh), sum(rooms)
    ends, end = [], 0.0
    for bytes_free in rooms:
        end += total * bytes_free / capacity
        ends.append(end)
    where: dict[int, str] = {}
    at, turn = 0.0, 0
    for index, unit in enumerate(work.units):
        while turn + 1 < len(chosen) and at + fresh[index] / 2 > ends[turn]:
            turn += 1
        at += fresh[index]
        where[index] = unit.home or chosen[turn]
    return where


def _fresh_bytes(work: ProgramUnits) -> list[int]:
    """Return for each unit the bytes of kept results, and of inputs without a location that no earlier unit reads."""
    storages = set(work.homes)
    bytes_list = []
    for unit in work.units:
        new = unit.reads - storages
        storages |= new
        bytes_list.append(unit.kept + sum(work.sizes[s] for s in new))
    return bytes_list
