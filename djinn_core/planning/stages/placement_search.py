"""Search for a placement that fits, after the placements of policies did not.

Small programs are searched completely by backtracking: blocks of values get devices in program order, and partial
placements that do not fit are abandoned. For larger programs, devices are filled one after the other, in several orders
and with increasing headroom. Then blocks move away from overfull devices as long as the shortage shrinks. The number of
examined placements is bounded. Only memory, dtypes and ops count, not speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.ir.colocation import Colocation, colocation_of, homes_of_values, resident_blocks, storage_sizes
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.planning.stages.placement_fit import (
    SHOWN,
    Shortage,
    dtype_of,
    missing_capability,
    needs,
    node_label,
    shortage_message,
    shortages,
    usable_bytes,
    values_of_node,
)
from djinn_core.planning.stages.simulate import copy_bytes

NAME: Final = "search"
SMALL: Final = 40  # maximum number of blocks for a complete search
WORK: Final = 20_000  # limit of nodes that a complete search examines; a check counts as `CHECK_WORK` further nodes
CHECK_WORK: Final = 10
CHECKS: Final = 64  # limit of examined placements of larger programs
FILLINGS: Final = 8  # attempts per device order, with increasing headroom for temporaries and copies
_INFINITE: Final = float("inf")

DeviceMap = Mapping[int, str]
NO_DEVICES: Mapping[int, str] = {}


def search(context: PlacementContext, *, spill: bool = False, fixed: DeviceMap = NO_DEVICES) -> Placement:
    """Return a placement that fits.

    Args:
        context: the placement problem.
        spill: True if the executors' spill memory counts.
        fixed: id of the required device, by node.

    Raises:
        DoesNotFit: no placement was found; the message names the obstacle, or the shortage of the best attempt.
    """
    search_state = _Search.of(context, spill, fixed)
    search_state.check_feasible()
    if len(search_state.blocks) <= SMALL:
        placement = search_state.search_blocks(0, {})
        if placement is not None:
            return placement
    return search_state.search_by_filling()


@attrs.frozen(eq=False)
class _Block:
    """Unit that must be on one device: storages with the nodes that create or write them, or a node that does neither.

    Attributes:
        number: key of the block, as in `Colocation`; `~node` for a node without a block.
        nodes: the nodes of the block.
        operands: blocks that the nodes read, in descending order of their persistent bytes.
        fresh: bytes of its inputs that are on no device yet.
        persistent: bytes of its inputs and of values that outlive the program.
        able: ids of the devices that may hold it, in the order of the topology.
        home: its current device, if it has one.
        first: position of the first node that uses it; the number of nodes if none does.
    """

    number: int
    nodes: tuple[int, ...]
    operands: tuple[int, ...]
    fresh: int
    persistent: int
    able: Mapping[str, None]
    home: str | None
    first: int


@attrs.define(eq=False)
class _Search:
    """The blocks of a program in order of first use, their possible devices, and the remaining work limit.

    Attributes:
        capacity: memory limit of each device in bytes, never below its resident bytes; None if unknown.
        distinct: devices with resident values, fixed nodes or a memory limit. The search does not exchange them for
            equal devices.
    """

    context: PlacementContext
    spill: bool
    colocation: Colocation
    blocks: list[_Block]
    fixed: DeviceMap
    devices: dict[str, DeviceCapabilities]
    before: dict[str, int]
    capacity: dict[str, int | None]
    distinct: frozenset[str]
    work: int = WORK
    checks: int = CHECKS

    @classmethod
    def of(cls, context: PlacementContext, spill: bool, fixed: DeviceMap) -> _Search:
        graph, nodes = context.graph, context.plan.nodes
        colocation = colocation_of(graph, nodes, context.plan.replace)
        devices = {d.id: d for d in context.topology.devices}
        before, limits = _before(context), context.memory_limits
        capacity: dict[str, int | None] = {}
        for name, device in devices.items():
            there = usable_bytes(device, before.get(name, 0), limits.get(name, 0), spill=spill)
            capacity[name] = None if there is None else max(there, before.get(name, 0))
        blocks = sorted(_blocks(context, colocation, fixed, capacity), key=lambda block: block.first)
        copy_devices = (d for holders in context.copies.values() for d in holders)
        distinct = frozenset((*context.resident.values(), *limits, *fixed.values(), *copy_devices))
        return cls(context, spill, colocation, blocks, fixed, devices, before, capacity, distinct)

    def check_feasible(self) -> None:
        """Raise an error if no placement can fit.

        Raises:
            DoesNotFit: no device can run a node, or the persistent bytes exceed the usable bytes of all devices
                together.
        """
        graph = self.context.graph
        for block in (b for b in self.blocks if not b.able):
            reasons = [f"{name}: {why}" for name in self.devices if (why := self._obstacle(name, block))]
            device_names = sorted({self.fixed[n] for n in block.nodes if n in self.fixed})
            what = node_label(graph, block.nodes[0]) if block.nodes else f"an input of {block.persistent:,} bytes"
            where = f", pinned to {', '.join(device_names)}," if device_names else ""
            why = "; ".join(reasons[:SHOWN]) or "its operands must be on several devices at once"
            raise DoesNotFit(f"{what}{where} fits on no device: {why}")
        capacity = [there for there in self.capacity.values() if there is not None]
        persistent, free = sum(b.persistent for b in self.blocks), sum(capacity)
        if len(capacity) == len(self.capacity) and persistent > free:
            raise DoesNotFit(
                f"inputs and kept values take {persistent:,} bytes, and all devices together have {free:,} bytes "
                f"free: {persistent - free:,} bytes are short"
            )

    def _obstacle(self, name: str, block: _Block) -> str:
        """Return the reason why a device could not hold a block even without other blocks; empty if it could."""
        there = _bytes(self.capacity[name])
        for node in block.nodes:
            if reason := missing_capability(self.context, node, self.devices[name]):
                return reason
            if (footprint := _footprint(self.context, node)) > there:
                what = f"{node_label(self.context.graph, node)} alone takes {footprint:,} bytes with its operands"
                return f"{what}, and there is room for {there:,.0f}: {footprint - there:,.0f} bytes are short"
        if block.fresh > there:
            return f"inputs of {block.fresh:,} bytes, and there is room for {there:,.0f}: {block.fresh - there:,.0f} bytes are short"
        return ""

    # --- complete -----------------------------------------------------------------------------------------------

    def search_blocks(self, position: int, homes: dict[int, str]) -> Placement | None:
        """Return the first fitting placement that extends `homes`; None if none was found within the work limit.

        `position` is the position of the next block. `homes` has the devices of the earlier blocks.
        """
        if position == len(self.blocks):
            placement = self._placement(homes)
            return None if shortages(self.context, placement, spill=self.spill) else placement
        block, later_blocks = self.blocks[position], self.blocks[position + 1 :]
        is_last = not later_blocks or later_blocks[0].first > block.first
        pending_bytes = sum(b.fresh for b in later_blocks)
        for device in self._candidates(block, homes):
            if self.work <= 0:
                return None
            homes[block.number] = device
            if not is_last or self._prefix_fits(
                homes, min(block.first + 1, len(self.context.plan.nodes)), pending_bytes
            ):
                best = self.search_blocks(position + 1, homes)
                if best is not None:
                    return best
            del homes[block.number]
        return None

    def _candidates(self, block: _Block, homes: DeviceMap) -> Iterator[str]:
        """Yield devices to try: devices of operands first, then by free bytes.

        Of interchangeable devices, yield only one.
        """
        distinguished = self.distinct.union(homes.values())
        near = {homes[b]: None for b in block.operands if b in homes}
        models: set[DeviceCapabilities] = set()
        for device in sorted(block.able, key=lambda d: (d != block.home, d not in near, -_bytes(self.capacity[d]))):
            if device not in distinguished:
                model = attrs.evolve(self.devices[device], id="", name="", group="", queue=0.0)
                if model in models:
                    continue
                models.add(model)
            yield device

    def _prefix_fits(self, homes: DeviceMap, count: int, pending_bytes: int) -> bool:
        """Return True if the first `count` nodes fit beside `pending_bytes` of later inputs.

        Temporaries of later nodes do not count yet.
        """
        context, colocation = self.context, self.colocation
        nodes = context.plan.nodes[:count]
        self.work -= count + CHECK_WORK
        inputs = {context.plan.replace.get(v, v) for n in nodes for v in context.graph.nodes[n].inputs}
        outputs = [v for n in nodes for v in context.graph.nodes[n].outputs]
        values = {v: homes[b] for v in (*context.graph.inputs, *outputs) if (b := colocation.block(v)) in homes}
        resident = {v: d for v, d in context.resident.items() if v in values and (v in inputs or values[v] == d)}
        copies = {v: holders for v, holders in context.copies.items() if v in resident}
        prefix_context = attrs.evolve(
            context, plan=attrs.evolve(context.plan, nodes=nodes), resident=resident, copies=copies
        )
        decisions = tuple(PlacementDecision(n, self._of_node(n, homes), "tried") for n in nodes)
        memory_needs, free = needs(prefix_context, Placement(decisions, values)), 0.0
        for device, limit in self.capacity.items():
            need = memory_needs.get(device)
            if limit is None:
                free = _INFINITE
            elif need is None:
                free += limit
            elif need.bytes > limit:
                return False
            else:
                free += max(0, limit - need.inputs)
        return pending_bytes <= free

    # --- filling ------------------------------------------------------------------------------------------------

    def search_by_filling(self) -> Placement:
        """Fill devices in several orders, then improve the best attempt.

        Raises:
            DoesNotFit: no attempt fits.
        """
        attempts: list[tuple[tuple[int, int], dict[int, str], tuple[Shortage, ...]]] = []
        for order in self._orders():
            bytes_left = {d: _bytes(self.capacity[d]) - self.before.get(d, 0) for d in order}
            for _ in range(FILLINGS):
                if not self.checks:
                    break
                homes = self._fill_devices(order, dict(bytes_left))
                placement = self._placement(homes)
                short = self._shortages(placement)
                if not short:
                    return placement
                attempts.append((_excess(short), homes, short))
                if not any(shortage.excess for shortage in short):
                    break
                for shortage in short:
                    bytes_left[shortage.device] -= shortage.excess
        _, homes, short = min(attempts, key=lambda m: m[0])
        return self._move_blocks(homes, short)

    def _orders(self) -> list[list[str]]:
        """Return device orders: topology order, most free bytes, least free bytes, fewest runnable blocks."""
        in_topology_order = list(self.devices)
        by_free_bytes = sorted(in_topology_order, key=lambda d: -_bytes(self.capacity[d]))
        able = (
            {d: sum(d in b.able for b in self.blocks) for d in in_topology_order}
            if len(in_topology_order) <= SMALL
            else {}
        )
        orders = [
            in_topology_order,
            by_free_bytes,
            by_free_bytes[::-1],
            sorted(by_free_bytes, key=lambda d: able.get(d, 0)),
        ]
        return [order for n, order in enumerate(orders) if order not in orders[:n]]

    def _fill_devices(self, order: Sequence[str], bytes_left: dict[str, float]) -> dict[int, str]:
        """Return a device for each block, given the free bytes of each device.

        The devices of a block's operands and of the previous block come first, then the devices in `order`.
        """
        homes: dict[int, str] = {}
        current = order[0]
        for block in self.blocks:
            bytes_needed = block.persistent if block.home is None else 0
            near = dict.fromkeys(homes[b] for b in block.operands if b in homes)
            home = () if block.home is None else (block.home,)
            candidates = (d for d in (*home, *near, current, *order) if d in block.able)
            device = next((d for d in candidates if bytes_left[d] >= bytes_needed), None) or max(
                block.able, key=bytes_left.__getitem__
            )
            homes[block.number] = current = device
            bytes_left[device] -= bytes_needed
        return homes

    def _move_blocks(self, homes: dict[int, str], short: tuple[Shortage, ...]) -> Placement:
        """Move blocks one by one away from overfull devices while the shortage shrinks. Return the placement.

        Raises:
            DoesNotFit: a shortage remains.
        """
        while short:
            better = next(self._improving_moves(homes, short), None)
            if better is None:
                raise DoesNotFit(f"all devices together cannot run this program ({shortage_message(short)})")
            homes, short = better
        return self._placement(homes)

    def _improving_moves(
        self, homes: dict[int, str], short: tuple[Shortage, ...]
    ) -> Iterator[tuple[dict[int, str], tuple[Shortage, ...]]]:
        """Yield the placement with one block moved, if that reduces the shortage."""
        memory_needs = needs(self.context, self._placement(homes))
        slack = {d: _bytes(r) - (memory_needs[d].bytes if d in memory_needs else 0) for d, r in self.capacity.items()}
        for shortage in short:
            movable = [b for b in self.blocks if homes[b.number] == shortage.device and len(b.able) > 1]
            for block in sorted(movable, key=lambda b: abs(b.persistent - shortage.excess)):
                elsewhere = (d for d in block.able if d != shortage.device)
                for target in sorted(elsewhere, key=lambda d: -slack[d])[:SHOWN]:
                    if not self.checks:
                        return
                    homes_after = {**homes, block.number: target}
                    after = self._shortages(self._placement(homes_after))
                    if _excess(after) < _excess(short):
                        yield homes_after, after

    # --- placements ---------------------------------------------------------------------------------------------

    def _shortages(self, placement: Placement) -> tuple[Shortage, ...]:
        self.checks -= 1
        return shortages(self.context, placement, spill=self.spill)

    def _placement(self, homes: DeviceMap) -> Placement:
        graph, nodes = self.context.graph, self.context.plan.nodes
        decisions = tuple([PlacementDecision(n, self._of_node(n, homes), self._placement_reason(n)) for n in nodes])
        values = homes_of_values(graph, nodes, self.colocation, homes)
        return Placement(decisions, values, NAME, fixed_nodes=frozenset(self.fixed))

    def _of_node(self, node: int, homes: DeviceMap) -> str:
        block = self.colocation.node(node)
        return homes[~node if block is None else block]

    def _placement_reason(self, node: int) -> str:
        return "the user asked for it" if node in self.fixed else "found by a search for a placement that fits"


def _bytes(there: int | None) -> float:
    return _INFINITE if there is None else there


def _excess(short: Sequence[Shortage]) -> tuple[int, int]:
    """Return the number of devices that lack an op or a dtype, and the missing bytes, to compare placements."""
    return sum(not s.excess for s in short), sum(s.excess for s in short)


def _before(context: PlacementContext) -> dict[str, int]:
    """Return, by device, the bytes of the program that are already on it."""
    inputs = frozenset(context.graph.inputs)
    nothing = attrs.evolve(context, plan=attrs.evolve(context.plan, nodes=()))
    memory_needs = needs(nothing, Placement((), {v: d for v, d in context.resident.items() if v in inputs}))
    return {device: need.before for device, need in memory_needs.items()}


def _footprint(context: PlacementContext, node: int) -> int:
    """Return the bytes on a device while a node runs: its operands or copies of them, its results and its workspace."""
    graph, sizes = context.graph, dict[int, int]()
    for value in values_of_node(context, node):
        storage = storage_of(value)
        sizes[storage] = max(sizes.get(storage, 0), copy_bytes(graph.meta(value)))
    rows = context.costs.by_device.values()
    return sum(sizes.values()) + min((row[node].workspace for row in rows if row), default=0)


def _blocks(
    context: PlacementContext, colocation: Colocation, fixed: DeviceMap, capacity: Mapping[str, int | None]
) -> Iterator[_Block]:
    graph, replace, nodes = context.graph, context.plan.replace, context.plan.nodes
    first: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    operands: dict[int, dict[int, None]] = {}
    for position, number in enumerate(nodes):
        colocated = colocation.node(number)
        block = ~number if colocated is None else colocated
        members.setdefault(block, []).append(number)
        for value in graph.nodes[number].inputs:
            read = colocation.block(replace.get(value, value))
            first.setdefault(read, position)
            operands.setdefault(block, {})[read] = None
        first.setdefault(block, position)
    inputs: dict[int, list[int]] = {}
    for value in graph.inputs:
        inputs.setdefault(colocation.block(value), []).append(value)
    sizes, persistent_sizes = storage_sizes(graph, graph.inputs), storage_sizes(graph, (*graph.inputs, *graph.outputs))
    persistent: dict[int, int] = {}
    for storage, size in persistent_sizes.items():
        persistent[colocation.leader(storage)] = persistent.get(colocation.leader(storage), 0) + size
    resident_storages = {storage_of(v): d for v, d in context.resident.items() if v != RANDOM_STATE}
    homes = resident_blocks(colocation, graph.inputs, context.resident)
    random_device = context.resident.get(RANDOM_STATE)
    capable = _CapableDevices(context, resident_storages)
    for block in dict.fromkeys((*first, *inputs)):
        block_nodes, inputs_of_block = members.get(block, []), inputs.get(block, [])
        fresh = sum(sizes[s] for s in {storage_of(v) for v in inputs_of_block} if s not in resident_storages)
        pinned_devices = {fixed[n] for n in block_nodes if n in fixed}
        if random_device is not None and any(graph.nodes[n].random for n in block_nodes):
            pinned_devices.add(random_device)
        able = capable.able(block_nodes, inputs_of_block)
        least = max((fresh, *(_footprint(context, n) for n in block_nodes)))
        if any(limit is not None and limit < least for limit in capacity.values()):
            able = {d: None for d in able if _bytes(capacity[d]) >= least}
        if pinned_devices:
            able = {d: None for d in able if pinned_devices == {d}}
        reads = sorted((b for b in operands.get(block, ()) if b != block), key=lambda b: -persistent.get(b, 0))
        fields = (block, tuple(block_nodes), tuple(reads), fresh, persistent.get(block, 0), able, homes.get(block))
        yield _Block(*fields, first.get(block, len(nodes)))


class _CapableDevices:
    """Devices that can run blocks, computed once per distinct set of missing dtypes and ops."""

    def __init__(self, context: PlacementContext, resident_storages: Mapping[int, str]) -> None:
        self._context, self._resident_storages = context, resident_storages
        self._devices_by_limits: dict[tuple[frozenset[str], frozenset[str]], list[DeviceCapabilities]] = {}
        for device in context.topology.devices:
            self._devices_by_limits.setdefault((device.dtypes, device.unsupported), []).append(device)
        self._order = dict.fromkeys(d.id for d in context.topology.devices)

    def able(self, nodes: Sequence[int], inputs: Sequence[int]) -> Mapping[str, None]:
        """Return the devices that have the ops and dtypes of `nodes`, and the dtypes of `inputs` to upload."""
        if len(self._devices_by_limits) == 1 and (frozenset(), frozenset()) in self._devices_by_limits:
            return self._order
        capable: set[str] = set()
        for (dtypes, _), devices in self._devices_by_limits.items():
            if any(missing_capability(self._context, node, devices[0]) for node in nodes):
                continue
            foreign = [v for v in inputs if dtypes and dtype_of(self._context.graph, v) not in dtypes]
            homes = {self._resident_storages.get(storage_of(v), "") for v in foreign}
            capable.update(d.id for d in devices if not homes or homes == {d.id})
        return {d: None for d in self._order if d in capable}
