"""Divide a program that is too large for one device into contiguous segments, for as few devices as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from djinn.planning import DeviceCapabilities
from djinn_costs.cost_based.units import ProgramUnits


def cuts(
    work: ProgramUnits, devices: Sequence[DeviceCapabilities], free_bytes: Mapping[str, float]
) -> Iterator[dict[int, str]]:
    """Yield placements in consecutive segments, on few devices first. A placement is the device of each unit.

    Inputs that have a location do not move. The size of a segment is proportional to the free memory of its device.
    """
    new_bytes = _new_bytes(work)
    total = sum(new_bytes)
    devices_by_free_bytes = sorted(range(len(devices)), key=lambda n: -free_bytes.get(devices[n].id, math.inf))
    free_bytes_of = [free_bytes.get(devices[n].id, float(total)) for n in devices_by_free_bytes]
    cumulative = 0.0
    for count, device_room in enumerate(free_bytes_of, 1):
        cumulative += device_room
        if cumulative < total:
            continue
        devices_used = [devices[n].id for n in sorted(devices_by_free_bytes[:count])]
        rooms_of = [free_bytes.get(d, float(total)) for d in devices_used]
        yield _divide_by_memory(work, new_bytes, devices_used, rooms_of)


def stages(work: ProgramUnits, devices: Sequence[str]) -> dict[int, str]:
    """Return the device of each unit, so that the segments take about equal times. Locations of inputs are ignored."""
    seconds = [min(unit.seconds, default=0.0) for unit in work.units]
    total, elapsed = sum(seconds) or 1.0, 0.0
    device_of_unit: dict[int, str] = {}
    for index, unit_seconds in enumerate(seconds):
        stage = int((elapsed + unit_seconds / 2) / total * len(devices))
        device_of_unit[index] = devices[min(stage, len(devices) - 1)]
        elapsed += unit_seconds
    return device_of_unit


def _divide_by_memory(
    work: ProgramUnits, new_bytes: Sequence[int], chosen_devices: Sequence[str], free_bytes_of: Sequence[float]
) -> dict[int, str]:
    total, capacity = sum(new_bytes), sum(free_bytes_of)
    ends, end = [], 0.0
    for bytes_free in free_bytes_of:
        end += total * bytes_free / capacity
        ends.append(end)
    device_of_unit: dict[int, str] = {}
    offset, segment = 0.0, 0
    for index, unit in enumerate(work.units):
        while segment + 1 < len(chosen_devices) and offset + new_bytes[index] / 2 > ends[segment]:
            segment += 1
        offset += new_bytes[index]
        device_of_unit[index] = unit.home or chosen_devices[segment]
    return device_of_unit


def _new_bytes(work: ProgramUnits) -> list[int]:
    """Return each unit's bytes: of results that outlive the program, and of unplaced inputs that it reads first."""
    storages = set(work.homes)
    bytes_list = []
    for unit in work.units:
        new_storages = unit.reads - storages
        storages |= new_storages
        bytes_list.append(unit.kept_bytes + sum(work.sizes[s] for s in new_storages))
    return bytes_list
