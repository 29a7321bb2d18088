"""Place units by list scheduling (HEFT): in order of critical path length, each where it finishes first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

import attrs

from djinn_costs.cost_based.hardware import Hardware
from djinn_costs.cost_based.units import ProgramUnits, Unit

# A weight that is copied to a device stays there, so this many runs of the program share the transfer time.
RUNS: Final = 8
_CANDIDATES: Final = 8  # devices in use to evaluate per unit


@attrs.define(eq=False, slots=False)
class PlacedUnits:
    """A placement of all units on devices.

    Attributes:
        device_of_unit: device of each unit.
        finish_times: predicted time at which each unit finishes, in seconds.
        second_best: second best device and its predicted finish, for each unit with several candidate devices.
        homes: device of each block of storages that must share a device.
        copies: devices that hold a copy of a storage, by storage.
    """

    device_of_unit: list[str]
    finish_times: list[float]
    second_best: dict[int, tuple[str, float]]
    homes: dict[int, str]
    copies: dict[int, list[str]] = attrs.field(factory=dict)

    @cached_property
    def seconds(self) -> float:
        """Return the predicted time of the whole program. All units must be placed."""
        return max(self.finish_times, default=0.0)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that run units, in order of first use."""
        return tuple(dict.fromkeys(self.device_of_unit))


Choose = Callable[[int, Unit, "ListScheduler"], Sequence[str]]


def rank_units(work: ProgramUnits, hardware: Hardware) -> list[int]:
    """Return the units in order of their critical path, the longest first. The order is a valid execution order."""
    units = work.units
    followers: list[list[int]] = [[] for _ in units]
    for index, unit in enumerate(units):
        for maker in unit.bytes_by_unit:
            followers[maker].append(index)
    ranks = [0.0] * len(units)
    pending = [len(f) for f in followers]
    ready = [index for index, count in enumerate(pending) if not count]
    inverse = 1 / hardware.rate
    while ready:
        index = ready.pop()
        after = max((ranks[f] + units[f].bytes_by_unit[index] * inverse for f in followers[index]), default=0.0)
        ranks[index] = min(units[index].seconds, default=0.0) + hardware.hop + after
        for maker in units[index].bytes_by_unit:
            pending[maker] -= 1
            if not pending[maker]:
                ready.append(maker)
    return sorted(range(len(units)), key=lambda i: (-ranks[i], i))


class ListScheduler:
    """Place units one after another, and keep track of the time at which each device becomes idle."""

    def __init__(
        self,
        work: ProgramUnits,
        hardware: Hardware,
        homes: Mapping[int, str],
        copies: Mapping[int, Sequence[str]],
        room: Mapping[str, float],
    ) -> None:
        self.work, self.hardware = work, hardware
        self.free_bytes, self.resident = dict(room), frozenset(homes)
        self.copies = {storage: {*devices} for storage, devices in copies.items()}
        self.idle_times: dict[str, float] = {}  # time at which each device in use becomes idle
        self.token_device: str | None = None  # device of the language model's generation
        self.result = PlacedUnits([""] * len(work.units), [0.0] * len(work.units), {}, dict(homes))
        self._group_devices()

    def _group_devices(self) -> None:
        """Group the unused devices by model, and by model and device group."""
        self.pools: dict[tuple[int, str], list[str]] = {}
        self.group_of: dict[str, str] = {}
        for device in reversed(self.hardware.devices):
            self.group_of[device.id] = device.group
            self.pools.setdefault((self.hardware.row_of[device.id], device.group), []).append(device.id)
        self.first_idle: dict[int, list[str]] = {}
        for device in reversed(self.hardware.devices):
            self.first_idle.setdefault(self.hardware.row_of[device.id], []).append(device.id)

    def run(self, order: Sequence[int], choose: Choose) -> PlacedUnits | None:
        """Return the placement of all units, or None if memory does not suffice.

        Args:
            order: indices of the units in execution order.
            choose: returns the candidate devices of a unit.
        """
        units, result = self.work.units, self.result
        for index in order:
            unit = units[index]
            if unit.is_light and unit.storage is not None and self._home(unit) is None:
                continue  # on the device of its first consumer
            candidates = self._candidate_devices(index, unit, choose)
            if not candidates:
                return None
            is_bound = unit.storage is not None and self.work.blocks.leader(unit.storage) in self.resident
            finish_times = sorted(
                (self._finish_time(unit, device, is_bound), position) for position, device in enumerate(candidates)
            )
            end, position = finish_times[0]
            if math.isinf(end):
                return None
            if len(finish_times) > 1:
                result.second_best[index] = (candidates[finish_times[1][1]], finish_times[1][0])
            self._place_unit(index, unit, candidates[position], end)
        self._place_unused_light_units(order)
        return result

    def _candidate_devices(self, index: int, unit: Unit, choose: Choose) -> Sequence[str]:
        home = self._home(unit)
        return [home] if home is not None else list(dict.fromkeys(choose(index, unit, self)))

    def _home(self, unit: Unit) -> str | None:
        if unit.storage is None:
            return None
        return self.result.homes.get(self.work.blocks.leader(unit.storage))

    def idle(self, near: str | None) -> list[str]:
        """Return the used devices that become idle first, and some unused devices.

        The unused devices are one per model, and one per model in the device group of `near`.
        """
        busy = heapq.nsmallest(_CANDIDATES, self.idle_times, key=self.idle_times.__getitem__)
        idle_devices = []
        for row, pool in self.first_idle.items():
            if near is not None:
                group_pool = self.pools.get((row, self.group_of.get(near, "")), [])
                while group_pool and group_pool[-1] in self.idle_times:
                    group_pool.pop()
                idle_devices += group_pool[-1:]
            while pool and pool[-1] in self.idle_times:
                pool.pop()
            idle_devices += pool[-1:]
        return [*busy, *idle_devices]

    def _finish_time(self, unit: Unit, device: str, bound: bool) -> float:
        """Return the time at which `unit` would finish on `device`, or infinity if the device lacks memory.

        `bound`: True if the unit must run on the device. Its memory is then not checked.
        """
        result, hardware = self.result, self.hardware
        ready, transfer_end = self.idle_times.get(device, 0.0), 0.0
        for maker, size in unit.bytes_by_unit.items():
            source = result.device_of_unit[maker]
            if source:
                ready = max(ready, result.finish_times[maker] + hardware.seconds(source, device, size))
        new_bytes = unit.kept_bytes
        for storage in unit.reads:
            home = result.homes.get(self.work.blocks.leader(storage))
            size = self.work.sizes[storage]
            if home is None:
                new_bytes += size
            elif home != device and device not in self.copies.get(storage, ()):
                seconds = hardware.seconds(home, device, size)
                if storage in self.work.weights:
                    transfer_end += seconds / RUNS
                    new_bytes += size
                else:
                    ready = max(ready, seconds)
        if not bound and new_bytes > self.free_bytes.get(device, math.inf):
            return math.inf
        return ready + transfer_end + unit.seconds[hardware.row_of[device]]

    def _place_unit(self, index: int, unit: Unit, device: str, end: float) -> None:
        result, blocks = self.result, self.work.blocks
        result.device_of_unit[index], result.finish_times[index] = device, end
        self.idle_times[device] = end
        if unit.generates_tokens and self.token_device is None:
            self.token_device = device
        bytes_left = self.free_bytes.get(device, math.inf) - unit.kept_bytes
        for storage in unit.reads:
            leader = blocks.leader(storage)
            home = result.homes.get(leader)
            if home is None:
                result.homes[leader] = device
                bytes_left -= self.work.sizes[storage]
            elif (
                home != device and storage in self.work.weights and device not in self.copies.setdefault(storage, set())
            ):
                self.copies[storage].add(device)
                result.copies.setdefault(storage, []).append(device)
                bytes_left -= self.work.sizes[storage]
        self.free_bytes[device] = bytes_left
        if unit.storage is not None:
            result.homes.setdefault(blocks.leader(unit.storage), device)
        for maker in unit.bytes_by_unit:  # light operands are placed here as well
            if not result.device_of_unit[maker]:
                self._place_light_unit(maker, device, end)

    def _place_light_unit(self, index: int, device: str, end: float) -> None:
        """Place a light unit and its light operands, each on its home, else on `device`, where the consumer runs."""
        unit, result = self.work.units[index], self.result
        home = self._home(unit) or device
        result.device_of_unit[index], result.finish_times[index] = home, 0.0
        self._set_homes(unit, home)
        for maker in unit.bytes_by_unit:
            if not result.device_of_unit[maker]:
                self._place_light_unit(maker, device, end)

    def _set_homes(self, unit: Unit, device: str) -> None:
        for storage in (*unit.reads, *(() if unit.storage is None else (unit.storage,))):
            self.result.homes.setdefault(self.work.blocks.leader(storage), device)

    def _place_unused_light_units(self, order: Sequence[int]) -> None:
        """Place the light units whose results no other unit uses."""
        main = next((d for d in self.result.device_of_unit if d), self.hardware.devices[0].id)
        for index in reversed(order):
            if not self.result.device_of_unit[index]:
                self._place_light_unit(index, main, 0.0)
