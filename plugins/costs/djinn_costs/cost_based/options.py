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
from djinn_costs.cost_based.listing import Choose, ListScheduler, PlacedUnits, ranked
from djinn_costs.cost_based.memory import SPARE, missing, room, transient_bytes
from djinn_costs.cost_based.parts import cuts
from djinn_costs.cost_based.units import Unit, work_of

_PIECES: Final = 16  # a unit may gather a sixteenth of a device's memory
# Options with equal predicted costs: a better rate must need less than this share of the other's time.
MAX_TIME_RATIO: Final = 0.9
_TRIED: Final = 4  # number of single devices, and of part counts, to evaluate


@attrs.frozen(eq=False)
class Option:
    """A candidate placement.

    Attributes:
        listed: the placed units.
        why: returns the reason for the device of a unit, by index.
        instead: the placement that was rejected for this one.
        uses: how hints influenced the placement.
    """

    listed: PlacedUnits
    why: Callable[[int], str]
    instead: Option | None = None
    uses: tuple[HintUse, ...] = ()

    def reason(self, index: int) -> str:
        """Return the reason for the device of unit `index`, and the predicted time of the rejected placement."""
        rejected = self.instead
        if rejected is None:
            return self.why(index)
        devices = len(rejected.listed.devices)
        apart = f"over {devices} devices" if devices > 1 else "in one place"
        return f"{self.why(index)}; {shown(self.listed.seconds)} in all, {apart} {shown(rejected.listed.seconds)}"


class Options:
    """Compute candidate placements of one program."""

    def __init__(self, context: PlacementContext) -> None:
        self.context = context
        self.pays = 1 - context.margin  # maximum predicted time of a divided program relative to one device
        self._refused = {d.id: m for d in context.topology.devices if (m := missing(context.graph, d))}
        self.devices = [d for d in context.topology.devices if d.id not in self._refused]
        if not self.devices:
            if not self._refused:
                raise InvalidStage("no devices are known; connect a server")
            refusals = "; ".join(f"{device} lacks {what}" for device, what in self._refused.items())
            raise DoesNotFit(f"no device can run this program ({refusals})")
        self.hardware = attrs.evolve(Hardware.of(context), devices=tuple(self.devices))
        heavy = min((d.memory for d in self.devices if d.memory), default=0) / _PIECES or math.inf
        blocks = colocation_of(context.graph, context.plan.nodes, context.plan.replace)
        _colocate(context, blocks.unite)
        stages = min(max(context.plan.hints.get("pipeline", (0,)), default=0), len(self.devices))
        pieces = _PIECES * stages if stages > 1 else 0
        self.work = work_of(context, blocks, self.hardware, heavy if len(self.devices) > 1 else math.inf, pieces)
        self.copies = {storage_of(v): holders for v, holders in context.copies.items()}
        outputs = frozenset(storage_of(v) for v in context.graph.outputs)
        smallest = min(
            (min(d.memory, d.memory if d.memory_free is None else d.memory_free) for d in self.devices if d.memory),
            default=0,
        )
        enough = smallest * (1 - SPARE) - sum(self.work.sizes.values()) if smallest else math.inf
        self.room = room(self.devices, self.work, self.copies, transient_bytes(context, outputs, enough))
        self._homes = resident_blocks(blocks, context.graph.inputs, context.resident)
        self._order = ranked(self.work, self.hardware)
        self._held = Counter[str]()
        for storage, home in self.work.homes.items():
            self._held[home] += self.work.sizes[storage]

    def listed(self, choose: Choose, fresh: str | None = None) -> PlacedUnits | None:
        """Place the units, in execution order, on the devices that `choose` returns.

        If memory does not suffice, return None.

        `fresh`: device for inputs that have no location. If None, each such input goes to the device that uses it
        first.
        """
        if fresh is None:
            return ListScheduler(self.work, self.hardware, self._homes, self.copies, self.room).run(self._order, choose)
        homes, room = dict(self._homes), dict(self.room)
        for storage, size in self.work.sizes.items():
            if homes.setdefault(self.work.blocks.leader(storage), fresh) == fresh and storage not in self.work.homes:
                room[fresh] = room.get(fresh, math.inf) - size
        if room.get(fresh, 0.0) < 0:
            return None
        return ListScheduler(self.work, self.hardware, homes, self.copies, room).run(self._order, choose)

    def undivided(self) -> Option | None:
        """Place the program on one device.

        If no device has enough memory, place segments on several devices, which run one after another.
        """
        return self.in_place() or self.in_parts()

    def in_place(self) -> Option | None:
        """Place the program on the device that holds most of its inputs.

        If the inputs have no location, choose the fastest device with enough memory.
        """
        if self._held:
            main = self._held.most_common(1)[0][0]
            listed = self.listed(lambda _, unit, listing: [followed(unit, listing) or main])
            if listed is not None:
                return Option(listed, lambda index: self._why_there(self.work.units[index], listed.where[index]))
        options = [
            (listed, d.id)
            for d in self._single_devices()
            if (listed := self.listed(lambda *_, d=d: [d.id])) is not None
        ]
        if not options:
            return None
        fastest, device = min(options, key=lambda o: o[0].seconds)
        reason = self._why_alone(device)
        return Option(fastest, lambda _: reason)

    def _single_devices(self) -> list[DeviceCapabilities]:
        """Return one device of each model with memory for all inputs. The fastest model comes first."""
        total = sum(self.work.sizes.values())
        candidates: dict[int, DeviceCapabilities] = {}
        for device in self.devices:
            row = self.hardware.row_of[device.id]
            if row not in candidates and self.room.get(device.id, math.inf) >= total - self._held[device.id]:
                candidates[row] = device
        quick = {row: sum(unit.seconds[row] for unit in self.work.units) for row in candidates}
        return [candidates[row] for row in sorted(candidates, key=quick.__getitem__)[:_TRIED]]

    def spread(self) -> Option | None:
        """Place each unit on the device where it finishes first. If this uses only one device, return None."""
        if len(self.devices) == 1:
            return None
        listing = self.listed(_soonest)
        if listing is None or len(listing.devices) == 1:
            return None
        return Option(listing, lambda index: self._why_soonest(listing, index))

    def main(self) -> str:
        """Return the device with most of the inputs. If the inputs have no location, return the first device."""
        return self._held.most_common(1)[0][0] if self._held else self.devices[0].id

    def holding_most(self, count: int) -> list[str]:
        """Return the `count` devices with most of the inputs, in the order of the topology."""
        first = sorted(range(len(self.devices)), key=lambda n: -self._held[self.devices[n].id])[:count]
        return [self.devices[n].id for n in sorted(first)]

    def in_parts(self) -> Option | None:
        """Place contiguous segments of the program on as few devices as memory allows."""
        for where in itertools.islice(cuts(self.work, self.devices, self.room), _TRIED):
            if (listing := self.listed(partial(_next_part, where))) is not None:
                return self._part_option(listing, list(dict.fromkeys(where.values())))
        return None

    def _part_option(self, listed: PlacedUnits, devices: Sequence[str]) -> Option:
        reasons = {device: self._why_part(number, len(devices)) for number, device in enumerate(devices, 1)}
        return Option(
            listed, lambda index: reasons.get(listed.where[index], "the values that it writes are on this device")
        )

    def why_nothing_fits(self) -> str:
        """Return the missing resources, for the error message."""
        total = sum(self.work.sizes.values())
        rooms = ", ".join(f"{d.id} {self.room.get(d.id, math.inf):,.0f}" for d in self.devices[:8])
        return (
            f"the {total:,} bytes of the inputs fit into no device and cannot be cut into parts (bytes free: {rooms}); "
            "connect more devices or larger ones"
        )

    # --- reasons ------------------------------------------------------------------------------------------------

    def _why_there(self, unit: Unit, device: str) -> str:
        if len(self._held) == 1:
            return f"{self._held[device]:,} of {sum(self.work.sizes.values()):,} bytes of the inputs are there"
        if unit.home == device:
            return "it writes values on this device" if unit.bound else "most of its inputs are on this device"
        return "its operands are there"

    def _why_alone(self, device: str) -> str:
        notes = "".join(f" (not {other}: it lacks {what})" for other, what in self._refused.items())
        return f"the only device{notes}" if len(self.devices) == 1 else f"the whole program fits on {device}{notes}"

    def _why_soonest(self, listed: PlacedUnits, index: int) -> str:
        if index in listed.second:
            other_device, when = listed.second[index]
            late = "not enough memory" if math.isinf(when) else shown(when)
            return f"it finishes there after {shown(listed.done[index])}, and on {other_device} after {late}"
        return "the values that it writes or uses are on this device"

    def _why_part(self, number: int, count: int) -> str:
        total = sum(self.work.sizes.values())
        return f"part {number} of {count} in program order: {total:,} bytes of inputs do not fit on one device"


def followed(unit: Unit, listing: ListScheduler) -> str | None:
    """Return the device that a unit should follow.

    This is its home, else the device with most of its inputs, else the device that computed most of its operands.
    """
    if unit.home is not None:
        return unit.home
    return _settled(unit, listing) or _made(unit, listing)


def _settled(unit: Unit, listing: ListScheduler, fresh: int = 0) -> str | None:
    """Return the device with most of a unit's inputs. If it holds at most `fresh` bytes of them, return None."""
    work, homes = listing.work, listing.result.homes
    bytes_by_device: dict[str, int] = {}
    for storage in unit.reads:
        home = homes.get(work.blocks.leader(storage))
        if home is not None:
            bytes_by_device[home] = bytes_by_device.get(home, 0) + work.sizes[storage]
    largest = max(bytes_by_device, key=bytes_by_device.__getitem__, default=None)
    return largest if largest is not None and bytes_by_device[largest] > fresh else None


def _made(unit: Unit, listing: ListScheduler) -> str | None:
    """Return the device that computed the largest operand of a unit. Of equal operands, the latest counts."""
    result = listing.result
    makers = [(size, result.done[m], result.where[m]) for m, size in unit.needs.items() if result.where[m]]
    return max(makers)[2] if makers else None


def _next_part(where: Mapping[int, str], index: int, unit: Unit, listing: ListScheduler) -> Sequence[str]:
    """Return the device of the unit's segment if the unit has new inputs.

    Any other unit follows its inputs and operands.
    """
    homes, leader = listing.result.homes, listing.work.blocks.leader
    fresh = unit.kept + sum(listing.work.sizes[s] for s in unit.reads if leader(s) not in homes)
    device = unit.home or _settled(unit, listing, fresh) or (None if fresh else _made(unit, listing))
    return [device or where[index]]


def _soonest(index: int, unit: Unit, listing: ListScheduler) -> Sequence[str]:
    """Return candidate devices for a unit: the device that it should follow, and idle devices.

    Units that generate tokens stay on one device, because each decode step needs the results of the previous step.
    """
    del index
    if unit.tokens and listing.tokens is not None:
        return [listing.tokens]
    near = followed(unit, listing)
    return ([] if near is None else [near]) + listing.idle(near)


def _colocate(context: PlacementContext, unite: Callable[[int, int], int]) -> None:
    """Unite the blocks of values that hints want on one device, unless the values are already on several devices."""
    graph, resident = context.graph, context.resident
    inputs = frozenset(graph.inputs)
    for group in context.plan.hints.get("colocate", ()):
        values = [v for v in group if v in inputs or graph.producer(v) is not None]
        if len({resident[v] for v in values if v in resident}) <= 1:
            for value in values[1:]:
                unite(storage_of(values[0]), storage_of(value))


def shown(seconds: float) -> str:
    """Format a number of seconds for a reason."""
    return f"{seconds * 1e3:.3g} ms"
