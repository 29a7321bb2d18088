"""The built-in placement policies: `single`, one device for everything, and `first_fit`, devices filled one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs

from djinn_core.errors import DoesNotFit, InvalidStage
from djinn_core.hookspecs import hookimpl
from djinn_core.hookspecs.placement import PlacementContext, PlacementPolicy
from djinn_core.ir.colocation import Colocation, homes_of_values, resident_blocks, storage_sizes, together
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.graph import Graph
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.values import RANDOM_STATE, storage_of
from djinn_core.stages.placement_fit import SHOWN, dtype_of, room, shortages, told, used_by

djinn_api_version = 1
ROUNDS = 8  # how often `first_fit` leaves more room for temporaries and copies


class SingleDevice:
    """Everything runs where most bytes of the inputs already are; without inputs, on the first device that fits.

    A device that has to spill comes after all others.
    """

    name = "single"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """One device and one reason for all.

        Raises:
            DoesNotFit: no device has the memory and the dtypes that the program needs.
            InvalidStage: there are no devices.
        """
        devices = context.topology.devices
        if not devices:
            raise InvalidStage("no device can run this program, because there are none; connect a server")
        held, fresh = _bytes_held(context.graph, context.resident), _Untouched()
        obstacles: dict[str, str] = {}
        if (drawing := _random_home(context)) is not None:
            obstacles = {d.id: f"random numbers are drawn on {drawing}" for d in devices if d.id != drawing}
            devices = tuple(d for d in devices if d.id == drawing)
        for spill in (False, True):
            for device in sorted(devices, key=lambda d: -held[d.id]):  # the first of those that hold the same
                if spill and not device.spill:
                    continue
                obstacles[device.id] = fresh.obstacle(context, device, spill)
                if not obstacles[device.id]:
                    return self._on(context, device, held, obstacles)
        raise DoesNotFit(f"no device can run this program alone ({_listed(obstacles)})")

    def _on(
        self,
        context: PlacementContext,
        device: DeviceCapabilities,
        held: Mapping[str, int],
        obstacles: Mapping[str, str],
    ) -> Placement:
        if held[device.id]:
            reason = f"{held[device.id]:,} of {sum(held.values()):,} bytes of the inputs are there"
        else:
            reason = "the first device" if device is context.topology.devices[0] else "the first device that fits"
        if refused := _listed(obstacles):
            reason = f"{reason} (not {refused})"
        return attrs.evolve(_alone(context, device.id, reason), policy=self.name)


def _listed(obstacles: Mapping[str, str]) -> str:
    told = [f"{device}: {obstacle}" for device, obstacle in obstacles.items() if obstacle]
    return "; ".join(told[:SHOWN]) + (f"; and {len(told) - SHOWN} more devices" if len(told) > SHOWN else "")


def _alone(context: PlacementContext, device: str, reason: str) -> Placement:
    decisions = tuple(PlacementDecision(node, device, reason) for node in context.plan.nodes)
    made = (v for node in context.graph.nodes for v in node.outputs)
    return Placement(decisions, dict.fromkeys((*context.graph.inputs, *made), device))


@attrs.define
class _Untouched:
    """Shortages on devices that hold nothing of the program yet: the same for equal room and dtypes."""

    _known: dict[DeviceCapabilities, str] = attrs.field(factory=dict)

    def obstacle(self, context: PlacementContext, device: DeviceCapabilities, spill: bool) -> str:
        """Reason why a program cannot run on a device, or an empty string."""
        if device.id in context.memory_limits or context.resident or context.copies:
            return _obstacle(context, device, spill)
        make = attrs.evolve(device, id=str(spill), name="", group="")
        if make not in self._known:
            self._known[make] = _obstacle(context, device, spill)
        return self._known[make]


def _obstacle(context: PlacementContext, device: DeviceCapabilities, spill: bool) -> str:
    here = [s for s in shortages(context, _alone(context, device.id, "asked"), spill=spill) if s.device == device.id]
    return here[0].reason if here else ""


def _random_home(context: PlacementContext) -> str | None:
    """Device on which random ops have to run, if there are any and it is known."""
    home = context.resident.get(RANDOM_STATE)
    return home if home is not None and any(context.graph.nodes[n].random for n in context.plan.nodes) else None


def _bytes_held(graph: Graph, resident: Mapping[int, str]) -> Counter[str]:
    sizes = storage_sizes(graph, graph.inputs)
    homes = {storage_of(v): resident[v] for v in graph.inputs if v in resident}
    held: Counter[str] = Counter()
    for storage, device in homes.items():
        held[device] += sizes[storage]
    return held


class FirstFit:
    """Devices are filled one after the other, in the order of the program: for what fits into no device alone.

    Only room and dtypes count; what is quick is for other policies to say.
    """

    name = "first_fit"
    tolerates_growth = True

    def place(self, context: PlacementContext) -> Placement:
        """A device for everything, with room left for temporaries and copies.

        Raises:
            DoesNotFit: it found no placement that fits; the message has the one that misses least.
            InvalidStage: there are no devices.
        """
        if not context.topology.devices:
            raise InvalidStage("there are no devices; connect a server")
        left = {d.id: room(d, 0, context.memory_limits.get(d.id, 0)) for d in context.topology.devices}
        missed: list[tuple[int, str]] = []
        for _ in range(ROUNDS):
            placement = _Filling(context, dict(left)).placement()
            found = shortages(context, placement)
            if not found:
                return placement
            missed.append((sum(s.excess for s in found), told(found)))
            for short in found:
                there = left[short.device]
                left[short.device] = (there or 0) - short.excess if short.excess else there
            if not any(short.excess for short in found):
                break
        raise DoesNotFit(f"all devices together cannot run this program ({min(missed)[1]})")


@attrs.define
class _Filling:
    """One walk over a program; `left` is what each device has room for, None if that is not known."""

    context: PlacementContext
    left: dict[str, int | None]
    homes: dict[int, str] = attrs.field(factory=dict)
    sizes: dict[int, int] = attrs.field(factory=dict)
    needed: dict[int, set[str]] = attrs.field(factory=dict)  # dtypes by block, of all that has to be with it
    current: str = ""

    def placement(self) -> Placement:
        """Placement of all nodes."""
        context = self.context
        graph, nodes, replace = context.graph, context.plan.nodes, context.plan.replace
        blocks = together(graph, nodes, replace)
        self.homes = resident_blocks(blocks, graph.inputs, context.resident)
        self._measure(blocks)
        self.current = context.topology.devices[0].id
        stayed, decisions = frozenset(self.homes), []
        for number in nodes:
            used = [replace.get(v, v) for v in graph.nodes[number].inputs]
            fresh = list(dict.fromkeys(b for v in used if (b := blocks.block(v)) not in self.homes))
            device = self._choose(number, blocks.node(number), fresh, [blocks.block(v) for v in used])
            for block in fresh:
                self._settle(block, device)
            where = (
                "what it writes is there" if blocks.node(number) in stayed else f"the first that has room is {device}"
            )
            decisions.append(PlacementDecision(number, device, where))
        for value in graph.inputs:
            self._settle(blocks.block(value), self.current)
        return Placement(tuple(decisions), homes_of_values(graph, nodes, blocks, self.homes), FirstFit.name)

    def _measure(self, blocks: Colocation) -> None:
        """Bytes that stay, and dtypes, by block."""
        context, graph = self.context, self.context.graph
        lasting = storage_sizes(graph, (*graph.inputs, *graph.outputs))
        for storage, size in lasting.items():
            self.sizes[blocks.leader(storage)] = self.sizes.get(blocks.leader(storage), 0) + size
        for value in graph.inputs:
            self.needed.setdefault(blocks.block(value), set()).add(dtype_of(graph, value))
        for number in context.plan.nodes:
            if (block := blocks.node(number)) is not None:
                self.needed.setdefault(block, set()).update(dtype_of(graph, v) for v in used_by(context, number))

    def _choose(self, number: int, block: int | None, fresh: list[int], used: list[int]) -> str:
        """Device of a node: that of its block, or the first device that has room for what comes with it."""
        if block is not None and block in self.homes:
            return self.homes[block]
        coming = list(dict.fromkeys((*fresh, *(() if block is None else (block,)))))
        wanted = sum(self.sizes.get(b, 0) for b in coming)
        dtypes = {dtype_of(self.context.graph, v) for v in used_by(self.context, number)}
        dtypes.update(*(self.needed.get(b, ()) for b in coming))
        found = list(self._candidates(dtypes, used)) or [d.id for d in self.context.topology.devices]
        device = next((d for d in found if self._has(d, wanted)), None) or max(found, key=self._room)
        for one in coming:
            self._settle(one, device)
        self.current = device
        return device

    def _candidates(self, dtypes: set[str], used: list[int]) -> Iterator[str]:
        """Devices with these dtypes: where operands are, the one that is being filled, then all in order."""
        able = [d.id for d in self.context.topology.devices if not d.dtypes or dtypes <= d.dtypes]
        homes = sorted({b for b in used if b in self.homes}, key=lambda b: -self.sizes.get(b, 0))
        near = [self.homes[b] for b in homes]
        yield from (d for d in dict.fromkeys((*near, self.current, *able)) if d in able)

    def _settle(self, block: int, device: str) -> None:
        if block in self.homes:
            return
        self.homes[block] = device
        there = self.left[device]
        if there is not None:
            self.left[device] = there - self.sizes.get(block, 0)

    def _has(self, device: str, wanted: int) -> bool:
        there = self.left[device]
        return there is None or there >= wanted

    def _room(self, device: str) -> float:
        there = self.left[device]
        return float("inf") if there is None else there


@hookimpl
def djinn_register_placement_policies() -> Iterable[PlacementPolicy]:
    """The policy `single`; `first_fit` is for what fits in no other way."""
    return [SingleDevice()]
