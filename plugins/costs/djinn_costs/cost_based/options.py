"""Candidate placements of one program, with a reason for each unit."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import attrs

from djinn.errors import DoesNotFit, InvalidStage
from djinn.hooks import PlacementContext
from djinn.planning import DeviceCapabilities, HintUse, colocation_of, resident_blocks, storage_of
from djinn_costs.cost_based.hardware import Hardware
from djinn_costs.cost_based.listing import Choose, ListScheduler, PlacedUnits, rank_units
from djinn_costs.cost_based.memory import SPARE, free_bytes, missing, transient_bytes
from djinn_costs.cost_based.parts import cuts
from djinn_costs.cost_based.units import Unit, divide_program

_PIECES: Final = 16  # a unit may gather a sixteenth of a device's memory
# A placement counts as faster than another placement if it takes less than this share of the other's predicted time.
MAX_TIME_RATIO: Final = 0.9
_MAX_TRIES: Final = 4  # number of single devices, and of part counts, to evaluate


@attrs.frozen(eq=False)
class Option:
    """A candidate placement.

    Attributes:
        placed_units: the device of each unit.
        why: returns the reason for the device of a unit, by index.
        rejected: the simpler placement that lost to this placement, or None.
        hint_uses: how hints influenced the placement.
    """

    placed_units: PlacedUnits
    why: Callable[[int], str]
    rejected: Option | None = None
    hint_uses: tuple[HintUse, ...] = ()

    def reason(self, index: int) -> str:
        """Return the reason for the device of unit `index`, and the predicted time of the rejected placement."""
        rejected = self.rejected
        if rejected is None:
            return self.why(index)
        devices = len(rejected.placed_units.devices)
        alternative = f"over {devices} devices" if devices > 1 else "in one place"
        return f"{self.why(index)}; {format_seconds(self.placed_units.seconds)} in all, {alternative} {format_seconds(rejected.placed_units.seconds)}"


class Options:
    """Compute candidate placements of one program."""

    def __init__(self, context: PlacementContext) -> None:
        self.context = context
        self.max_time_ratio_of_division = (
            1 - context.margin
        )  # maximum predicted time of a divided program relative to one device
        self._rejected_devices = {d.id: m for d in context.topology.devices if (m := missing(context.graph, d))}
        self.devices = [d for d in context.topology.devices if d.id not in self._rejected_devices]
        if not self.devices:
            if not self._rejected_devices:
                raise InvalidStage("no devices are known; connect a server")
            refusals = "; ".join(
                f"{device} lacks {unsupported}" for device, unsupported in self._rejected_devices.items()
            )
            raise DoesNotFit(f"no device can run this program ({refusals})")
        self.hardware = attrs.evolve(Hardware.of(context), devices=tuple(self.devices))
        heavy = min((d.memory for d in self.devices if d.memory), default=0) / _PIECES or math.inf
        blocks = colocation_of(context.graph, context.plan.nodes, context.plan.replace)
        _colocate(context, blocks.unite)
        stages = min(max(context.plan.hints.get("pipeline", (0,)), default=0), len(self.devices))
        pieces = _PIECES * stages if stages > 1 else 0
        self.work = divide_program(context, blocks, self.hardware, heavy if len(self.devices) > 1 else math.inf, pieces)
        self.copies = {storage_of(v): holders for v, holders in context.copies.items()}
        outputs = frozenset(storage_of(v) for v in context.graph.outputs)
        smallest = min(
            (min(d.memory, d.memory if d.memory_free is None else d.memory_free) for d in self.devices if d.memory),
            default=0,
        )
        enough = smallest * (1 - SPARE) - sum(self.work.sizes.values()) if smallest else math.inf
        self.free_bytes = free_bytes(self.devices, self.work, self.copies, transient_bytes(context, outputs, enough))
        self._new_homes = resident_blocks(blocks, context.graph.inputs, context.resident)
        self._order = rank_units(self.work, self.hardware)
        self._input_bytes = Counter[str]()
        for storage, home in self.work.homes.items():
            self._input_bytes[home] += self.work.sizes[storage]

    def place_units(self, choose: Choose, new_input_device: str | None = None) -> PlacedUnits | None:
        """Place the units in order on the devices that `choose` returns. Return None if memory does not suffice.

        `new_input_device`: device for inputs that have no location. If None, each such input goes to the first device that
        uses it.
        """
        if new_input_device is None:
            return ListScheduler(self.work, self.hardware, self._new_homes, self.copies, self.free_bytes).run(
                self._order, choose
            )
        homes, free_bytes = dict(self._new_homes), dict(self.free_bytes)
        for storage, size in self.work.sizes.items():
            if (
                homes.setdefault(self.work.blocks.leader(storage), new_input_device) == new_input_device
                and storage not in self.work.homes
            ):
                free_bytes[new_input_device] = free_bytes.get(new_input_device, math.inf) - size
        if free_bytes.get(new_input_device, 0.0) < 0:
            return None
        return ListScheduler(self.work, self.hardware, homes, self.copies, free_bytes).run(self._order, choose)

    def undivided(self) -> Option | None:
        """Place the program on one device.

        If no device has enough memory, place segments on several devices, which run one after another. Return None if
        all devices together have too little memory.
        """
        return self.on_one_device() or self.in_parts()

    def on_one_device(self) -> Option | None:
        """Return the placement on the device with most of the inputs.

        If the inputs have no location or this device has too little memory, choose the fastest device with enough memory.
        Return None if no device has enough.
        """
        if self._input_bytes:
            main = self._input_bytes.most_common(1)[0][0]
            placed_units = self.place_units(lambda _, unit, listing: [device_to_follow(unit, listing) or main])
            if placed_units is not None:
                return Option(
                    placed_units,
                    lambda index: self._reason_for_home(self.work.units[index], placed_units.device_of_unit[index]),
                )
        options = [
            (placed_units, d.id)
            for d in self._single_devices()
            if (placed_units := self.place_units(lambda *_, d=d: [d.id])) is not None
        ]
        if not options:
            return None
        fastest, device = min(options, key=lambda o: o[0].seconds)
        reason = self._reason_for_single(device)
        return Option(fastest, lambda _: reason)

    def _single_devices(self) -> list[DeviceCapabilities]:
        """Return one device of each hardware model with memory for all inputs: at most `_MAX_TRIES`, the fastest first."""
        total = sum(self.work.sizes.values())
        candidates: dict[int, DeviceCapabilities] = {}
        for device in self.devices:
            row = self.hardware.row_of[device.id]
            if (
                row not in candidates
                and self.free_bytes.get(device.id, math.inf) >= total - self._input_bytes[device.id]
            ):
                candidates[row] = device
        quick = {row: sum(unit.seconds[row] for unit in self.work.units) for row in candidates}
        return [candidates[row] for row in sorted(candidates, key=quick.__getitem__)[:_MAX_TRIES]]

    def spread(self) -> Option | None:
        """Place each unit where it finishes first. Return None if memory does not suffice or one device is used."""
        if len(self.devices) == 1:
            return None
        listing = self.place_units(_earliest_candidates)
        if listing is None or len(listing.devices) == 1:
            return None
        return Option(listing, lambda index: self._reason_for_earliest(listing, index))

    def main(self) -> str:
        """Return the device with most of the inputs. If the inputs have no location, return the first device."""
        return self._input_bytes.most_common(1)[0][0] if self._input_bytes else self.devices[0].id

    def holding_most(self, count: int) -> list[str]:
        """Return the `count` devices with most of the inputs, in the order of the topology."""
        first = sorted(range(len(self.devices)), key=lambda n: -self._input_bytes[self.devices[n].id])[:count]
        return [self.devices[n].id for n in sorted(first)]

    def in_parts(self) -> Option | None:
        """Place contiguous segments on as few devices as memory allows. Return None if memory does not suffice."""
        for device_of_unit in itertools.islice(cuts(self.work, self.devices, self.free_bytes), _MAX_TRIES):
            if (listing := self.place_units(partial(_next_part, device_of_unit))) is not None:
                return self._part_option(listing, list(dict.fromkeys(device_of_unit.values())))
        return None

    def _part_option(self, listed: PlacedUnits, devices: Sequence[str]) -> Option:
        reasons = {device: self._reason_for_part(number, len(devices)) for number, device in enumerate(devices, 1)}
        return Option(
            listed,
            lambda index: reasons.get(listed.device_of_unit[index], "the values that it writes are on this device"),
        )

    def why_nothing_fits(self) -> str:
        """Return the error message about the missing memory, with figures."""
        total = sum(self.work.sizes.values())
        rooms = ", ".join(f"{d.id} {self.free_bytes.get(d.id, math.inf):,.0f}" for d in self.devices[:8])
        return (
            f"the {total:,} bytes of the inputs fit into no device and cannot be cut into parts (bytes free: {rooms}); "
            "connect more devices or larger ones"
        )

    # --- reasons ------------------------------------------------------------------------------------------------

    def _reason_for_home(self, unit: Unit, device: str) -> str:
        if len(self._input_bytes) == 1:
            return f"{self._input_bytes[device]:,} of {sum(self.work.sizes.values()):,} bytes of the inputs are on this device"
        if unit.home == device:
            return "it writes values on this device" if unit.is_bound else "most of its inputs are on this device"
        return "its operands are on this device"

    def _reason_for_single(self, device: str) -> str:
        notes = "".join(
            f" (not {unsupported_device}: it lacks {unsupported})"
            for unsupported_device, unsupported in self._rejected_devices.items()
        )
        return f"the only device{notes}" if len(self.devices) == 1 else f"the whole program fits on {device}{notes}"

    def _reason_for_earliest(self, listed: PlacedUnits, index: int) -> str:
        if index in listed.second_best:
            other_device, other_end = listed.second_best[index]
            end_text = "not enough memory" if math.isinf(other_end) else format_seconds(other_end)
            return f"it finishes there after {format_seconds(listed.finish_times[index])}, and on {other_device} after {end_text}"
        return "the values that it writes or uses are on this device"

    def _reason_for_part(self, number: int, count: int) -> str:
        total = sum(self.work.sizes.values())
        return f"part {number} of {count} in program order: {total:,} bytes of inputs do not fit on one device"


def device_to_follow(unit: Unit, listing: ListScheduler) -> str | None:
    """Return the device that a unit should follow: its home, else the device with most of its inputs.

    Without both, return the device that computed the unit's largest operand, or None if no device computed any.
    """
    if unit.home is not None:
        return unit.home
    return _device_of_inputs(unit, listing) or _device_of_operands(unit, listing)


def _device_of_inputs(unit: Unit, listing: ListScheduler, min_bytes: int = 0) -> str | None:
    """Return the device with most of a unit's inputs. If it holds at most `min_bytes` bytes of them, return None."""
    work, homes = listing.work, listing.result.homes
    bytes_by_device: dict[str, int] = {}
    for storage in unit.reads:
        home = homes.get(work.blocks.leader(storage))
        if home is not None:
            bytes_by_device[home] = bytes_by_device.get(home, 0) + work.sizes[storage]
    largest = max(bytes_by_device, key=bytes_by_device.__getitem__, default=None)
    return largest if largest is not None and bytes_by_device[largest] > min_bytes else None


def _device_of_operands(unit: Unit, listing: ListScheduler) -> str | None:
    """Return the device of the unit that makes most bytes of the operands, the last to finish if several, or None."""
    result = listing.result
    makers = [
        (size, result.finish_times[m], result.device_of_unit[m])
        for m, size in unit.bytes_by_unit.items()
        if result.device_of_unit[m]
    ]
    return max(makers)[2] if makers else None


def _next_part(device_of_unit: Mapping[int, str], index: int, unit: Unit, listing: ListScheduler) -> Sequence[str]:
    """Return the device of a unit: its home, else the device that holds more bytes of its inputs than the unit adds.

    If it adds none, it follows its largest operand. In all other cases, it runs on the device of its segment.
    """
    homes, leader = listing.result.homes, listing.work.blocks.leader
    new_bytes = unit.kept_bytes + sum(listing.work.sizes[s] for s in unit.reads if leader(s) not in homes)
    device = (
        unit.home
        or _device_of_inputs(unit, listing, new_bytes)
        or (None if new_bytes else _device_of_operands(unit, listing))
    )
    return [device or device_of_unit[index]]


def _earliest_candidates(index: int, unit: Unit, listing: ListScheduler) -> Sequence[str]:
    """Return candidate devices for a unit: the device of `device_to_follow`, then idle devices.

    For a unit that generates tokens, return only the device of earlier such units, if any, because each decode step
    needs the results of the previous step.
    """
    del index
    if unit.generates_tokens and listing.token_device is not None:
        return [listing.token_device]
    followed_device = device_to_follow(unit, listing)
    return ([] if followed_device is None else [followed_device]) + listing.idle(followed_device)


def _colocate(context: PlacementContext, unite: Callable[[int, int], int]) -> None:
    """Unite the blocks of values that hints want on one device, unless the values are already on several devices."""
    graph, resident = context.graph, context.resident
    inputs = frozenset(graph.inputs)
    for group in context.plan.hints.get("colocate", ()):
        values = [v for v in group if v in inputs or graph.producer(v) is not None]
        if len({resident[v] for v in values if v in resident}) <= 1:
            for value in values[1:]:
                unite(storage_of(values[0]), storage_of(value))


def format_seconds(seconds: float) -> str:
    """Return seconds as text for a reason."""
    return f"{seconds * 1e3:.3g} ms"
