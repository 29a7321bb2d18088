"""Search for a placement that fits, after the placements of policies did not.

Small programs are searched completely by backtracking: blocks of values get devices in program order, and a partial
placement that does not fit is cut off. For larger programs, devices are filled one after the other, in several orders
and with increasing headroom. Then blocks move away from overfull devices as long as the shortage shrinks. The number of
examined placements is bounded. Only memory, dtypes and ops count, not speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from djinn_core.errors import DoesNotFit
from djinn_core.hookspecs.placement_policies import PlacementContext
from djinn_core.ir.colocation import Colocation, homes_of_values, resident_blocks, storage_sizes, together
from djinn_core.ir.costs import DeviceCapabilities
from djinn_core.ir.handles import RANDOM_STATE, storage_of
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.planning.stages.placement_fit import (
    SHOWN,
    Shortage,
    dtype_of,
    lacking,
    needs,
    node_label,
    shortage_message,
    shortages,
    usable_bytes,
    used_by,
)
from djinn_core.planning.stages.simulate import copy_bytes

NAME: Final = "search"
SMALL: Final = 40  # maximum number of blocks for a complete search
WORK: Final = 20_000  # limit of nodes that a complete search examines; a check counts as `EACH` more
EACH: Final = 10
CHECKS: Final = 64  # limit of examined placements of larger programs
FILLINGS: Final = 8  # attempts per device order, with increasing headroom for temporaries and copies
_INFINITE: Final = float("inf")

Where = Mapping[int, str]
NOWHERE: Mapping[int, str] = {}


def search(context: PlacementContext, *, spill: bool = False, pinned: Where = NOWHERE) -> Placement:
    """Return a placement that fits.

    Args:
        context: the placement problem.
        spill: True if the executors' spill memory counts.
        pinned: required device by node.

    Raises:
        DoesNotFit: no placement was found; the message names the obstacle, or the shortage of the best attempt.
    """
    search_state = _Search.of(context, spill, pinned)
    search_state.check_hope()
    if len(search_state.blocks) <= SMALL:
        placement = search_state.extended(0, {})
        if placement is not None:
            return placement
    return search_state.by_filling()


@attrs.frozen(eq=False)
class _Block:
    """Unit that must be on one device: storages with the nodes that create or write them, or a node that does neither.

    Attributes:
        number: key of the block, as in `Colocation`; `~node` for a node without a block.
        nodes: the nodes of the block.
        operands: blocks that the nodes read, in descending order of their persistent bytes.
        fresh: bytes of its inputs that are on no device yet.
        persistent: bytes of its inputs and of kept values.
        able: devices that may hold it, in the order of the topology.
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
        distinct: devices with resident or pinned values, or with a memory limit. The search does not swap them for equal devices.
    """

    context: PlacementContext
    spill: bool
    together: Colocation
    blocks: list[_Block]
    pinned: Where
    devices: dict[str, DeviceCapabilities]
    before: dict[str, int]
    capacity: dict[str, int | None]
    distinct: frozenset[str]
    work: int = WORK
    checks: int = CHECKS

    @classmethod
    def of(cls, context: PlacementContext, spill: bool, pinned: Where) -> _Search:
        graph, nodes = context.graph, context.plan.nodes
        joined = together(graph, nodes, context.plan.replace)
        devices = {d.id: d for d in context.topology.devices}
        before, limits = _before(context), context.memory_limits
        capacity: dict[str, int | None] = {}
        for name, device in devices.items():
            there = usable_bytes(device, before.get(name, 0), limits.get(name, 0), spill=spill)
            capacity[name] = None if there is None else max(there, before.get(name, 0))
        blocks = sorted(_blocks(context, joined, pinned, capacity), key=lambda block: block.first)
        copied = (d for kept in context.copies.values() for d in kept)
        distinct = frozenset((*context.resident.values(), *limits, *pinned.values(), *copied))
        return cls(context, spill, joined, blocks, pinned, devices, before, capacity, distinct)

    def check_hope(self) -> None:
        """Raise an error if no placement can fit.

        Raises:
            DoesNotFit: no device can run a node, or the persistent bytes exceed the usable bytes of all devices
                together.
        """
        graph = self.context.graph
        for block in (b for b in self.blocks if not b.able):
            reasons = [f"{name}: {why}" for name in self.devices if (why := self._obstacle(name, block))]
            device_names = sorted({self.pinned[n] for n in block.nodes if n in self.pinned})
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
        """Return the reason why a device could not hold a block even if it were empty; otherwise an empty string."""
        there = _bytes(self.capacity[name])
        for node in block.nodes:
            if reason := lacking(self.context, node, self.devices[name]):
                return reason
            if (footprint := _footprint(self.context, node)) > there:
                what = f"{node_label(self.context.graph, node)} alone takes {footprint:,} bytes with its operands"
                return f"{what}, and there is room for {there:,.0f}: {footprint - there:,.0f} bytes are short"
        if block.fresh > there:
            return f"inputs of {block.fresh:,} bytes, and there is room for {there:,.0f}: {block.fresh - there:,.0f} bytes are short"
        return ""

    # --- complete -----------------------------------------------------------------------------------------------

    def extended(self, turn: int, homes: dict[int, str]) -> Placement | None:
        """Return the first fitting placement that extends `homes`; None if there is none, or at the work limit.

        `turn`: position of the next block. `homes`: devices of the earlier blocks.
        """
        if turn == len(self.blocks):
            placement = self._placement(homes)
            return None if shortages(self.context, placement, spill=self.spill) else placement
        block, rest = self.blocks[turn], self.blocks[turn + 1 :]
        is_last = not rest or rest[0].first > block.first
        left = sum(b.fresh for b in rest)
        for device in self._candidates(block, homes):
            if self.work <= 0:
                return None
            homes[block.number] = device
            if not is_last or self._prefix_fits(homes, min(block.first + 1, len(self.context.plan.nodes)), left):
                best = self.extended(turn + 1, homes)
                if best is not None:
                    return best
            del homes[block.number]
        return None

    def _candidates(self, block: _Block, homes: Where) -> Iterator[str]:
        """Yield devices to try: near devices first, then by free bytes. Of interchangeable devices yield only one."""
        touched = self.distinct.union(homes.values())
        near = {homes[b]: None for b in block.operands if b in homes}
        seen: set[DeviceCapabilities] = set()
        for device in sorted(block.able, key=lambda d: (d != block.home, d not in near, -_bytes(self.capacity[d]))):
            if device not in touched:
                make = attrs.evolve(self.devices[device], id="", name="", group="", queue=0.0)
                if make in seen:
                    continue
                seen.add(make)
            yield device

    def _prefix_fits(self, homes: Where, count: int, left: int) -> bool:
        """Return True if the first `count` nodes fit, and the `left` inputs fit in addition to the initial contents.

        Temporaries of later nodes do not count yet.
        """
        context, joined = self.context, self.together
        nodes = context.plan.nodes[:count]
        self.work -= count + EACH
        inputs = {context.plan.replace.get(v, v) for n in nodes for v in context.graph.nodes[n].inputs}
        outputs = [v for n in nodes for v in context.graph.nodes[n].outputs]
        values = {v: homes[b] for v in (*context.graph.inputs, *outputs) if (b := joined.block(v)) in homes}
        there = {v: d for v, d in context.resident.items() if v in values and (v in inputs or values[v] == d)}
        copies = {v: kept for v, kept in context.copies.items() if v in there}
        begun = attrs.evolve(context, plan=attrs.evolve(context.plan, nodes=nodes), resident=there, copies=copies)
        decisions = tuple(PlacementDecision(n, self._of_node(n, homes), "tried") for n in nodes)
        taken, free = needs(begun, Placement(decisions, values)), 0.0
        for device, bound in self.capacity.items():
            need = taken.get(device)
            if bound is None:
                free = _INFINITE
            elif need is None:
                free += bound
            elif need.bytes > bound:
                return False
            else:
                free += max(0, bound - need.inputs)
        return left <= free

    # --- filling ------------------------------------------------------------------------------------------------

    def by_filling(self) -> Placement:
        """Fill devices in several orders, then improve the best attempt.

        Raises:
            DoesNotFit: no attempt fits.
        """
        missed: list[tuple[tuple[int, int], dict[int, str], tuple[Shortage, ...]]] = []
        for order in self._orders():
            bytes_left = {d: _bytes(self.capacity[d]) - self.before.get(d, 0) for d in order}
            for _ in range(FILLINGS):
                if not self.checks:
                    break
                homes = self._filled(order, dict(bytes_left))
                placement = self._placement(homes)
                short = self._shortages(placement)
                if not short:
                    return placement
                missed.append((_excess(short), homes, short))
                if not any(one.excess for one in short):
                    break
                for one in short:
                    bytes_left[one.device] -= one.excess
        _, homes, short = min(missed, key=lambda m: m[0])
        return self._repaired(homes, short)

    def _orders(self) -> list[list[str]]:
        """Return device orders: as in the topology, by most free bytes, by least free bytes, and by fewest runnable blocks."""
        plain = list(self.devices)
        roomiest = sorted(plain, key=lambda d: -_bytes(self.capacity[d]))
        able = {d: sum(d in b.able for b in self.blocks) for d in plain} if len(plain) <= SMALL else {}
        orders = [plain, roomiest, roomiest[::-1], sorted(roomiest, key=lambda d: able.get(d, 0))]
        return [order for n, order in enumerate(orders) if order not in orders[:n]]

    def _filled(self, order: Sequence[str], left: dict[str, float]) -> dict[int, str]:
        """Return the device of each block: near its operands or the previous block if memory is free there, else the next of `order`."""
        homes: dict[int, str] = {}
        current = order[0]
        for block in self.blocks:
            bytes_needed = block.persistent if block.home is None else 0
            near = dict.fromkeys(homes[b] for b in block.operands if b in homes)
            own = () if block.home is None else (block.home,)
            ranked = (d for d in (*own, *near, current, *order) if d in block.able)
            device = next((d for d in ranked if left[d] >= bytes_needed), None) or max(block.able, key=left.__getitem__)
            homes[block.number] = current = device
            left[device] -= bytes_needed
        return homes

    def _repaired(self, homes: dict[int, str], short: tuple[Shortage, ...]) -> Placement:
        """Move blocks one by one away from overfull devices while the shortage shrinks. Return the placement.

        Raises:
            DoesNotFit: a shortage remains.
        """
        while short:
            better = next(self._improved(homes, short), None)
            if better is None:
                raise DoesNotFit(f"all devices together cannot run this program ({shortage_message(short)})")
            homes, short = better
        return self._placement(homes)

    def _improved(
        self, homes: dict[int, str], short: tuple[Shortage, ...]
    ) -> Iterator[tuple[dict[int, str], tuple[Shortage, ...]]]:
        """Yield the placement with one block moved, if that reduces the shortage."""
        memory_needs = needs(self.context, self._placement(homes))
        slack = {d: _bytes(r) - (memory_needs[d].bytes if d in memory_needs else 0) for d, r in self.capacity.items()}
        for one in short:
            here = [b for b in self.blocks if homes[b.number] == one.device and len(b.able) > 1]
            for block in sorted(here, key=lambda b: abs(b.persistent - one.excess)):
                elsewhere = (d for d in block.able if d != one.device)
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

    def _placement(self, homes: Where) -> Placement:
        graph, nodes = self.context.graph, self.context.plan.nodes
        decisions = tuple([PlacementDecision(n, self._of_node(n, homes), self._placement_reason(n)) for n in nodes])
        values = homes_of_values(graph, nodes, self.together, homes)
        return Placement(decisions, values, NAME, pinned=frozenset(self.pinned))

    def _of_node(self, node: int, homes: Where) -> str:
        block = self.together.node(node)
        return homes[~node if block is None else block]

    def _placement_reason(self, node: int) -> str:
        return "the user asked for it" if node in self.pinned else "found by a search for a placement that fits"


def _bytes(there: int | None) -> float:
    return _INFINITE if there is None else there


def _excess(short: Sequence[Shortage]) -> tuple[int, int]:
    """Return a measure of how far a placement is from fitting: devices that lack an op or a dtype, then bytes."""
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
    for value in used_by(context, node):
        storage = storage_of(value)
        sizes[storage] = max(sizes.get(storage, 0), copy_bytes(graph.meta(value)))
    rows = context.costs.by_device.values()
    return sum(sizes.values()) + min((row[node].workspace for row in rows if row), default=0)


def _blocks(
    context: PlacementContext, joined: Colocation, pinned: Where, capacity: Mapping[str, int | None]
) -> Iterator[_Block]:
    graph, replace, nodes = context.graph, context.plan.replace, context.plan.nodes
    first: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    operands: dict[int, dict[int, None]] = {}
    for position, number in enumerate(nodes):
        own = joined.node(number)
        block = ~number if own is None else own
        members.setdefault(block, []).append(number)
        for value in graph.nodes[number].inputs:
            read = joined.block(replace.get(value, value))
            first.setdefault(read, position)
            operands.setdefault(block, {})[read] = None
        first.setdefault(block, position)
    inputs: dict[int, list[int]] = {}
    for value in graph.inputs:
        inputs.setdefault(joined.block(value), []).append(value)
    sizes, kept = storage_sizes(graph, graph.inputs), storage_sizes(graph, (*graph.inputs, *graph.outputs))
    persistent: dict[int, int] = {}
    for storage, size in kept.items():
        persistent[joined.leader(storage)] = persistent.get(joined.leader(storage), 0) + size
    settled = {storage_of(v): d for v, d in context.resident.items() if v != RANDOM_STATE}
    homes = resident_blocks(joined, graph.inputs, context.resident)
    drawing = context.resident.get(RANDOM_STATE)
    makes = _Makes(context, settled)
    for block in dict.fromkeys((*first, *inputs)):
        its, input_storages = members.get(block, []), inputs.get(block, [])
        fresh = sum(sizes[s] for s in {storage_of(v) for v in input_storages} if s not in settled)
        pinned_devices = {pinned[n] for n in its if n in pinned}
        if drawing is not None and any(graph.nodes[n].random for n in its):
            pinned_devices.add(drawing)
        able = makes.able(its, input_storages)
        least = max((fresh, *(_footprint(context, n) for n in its)))
        if any(there is not None and there < least for there in capacity.values()):
            able = {d: None for d in able if _bytes(capacity[d]) >= least}
        if pinned_devices:
            able = {d: None for d in able if pinned_devices == {d}}
        reads = sorted((b for b in operands.get(block, ()) if b != block), key=lambda b: -persistent.get(b, 0))
        known = (block, tuple(its), tuple(reads), fresh, persistent.get(block, 0), able, homes.get(block))
        yield _Block(*known, first.get(block, len(nodes)))


class _Makes:
    """Devices that can run blocks, computed once per distinct set of missing dtypes and ops."""

    def __init__(self, context: PlacementContext, settled: Mapping[int, str]) -> None:
        self._context, self._settled = context, settled
        self._alike: dict[tuple[frozenset[str], frozenset[str]], list[DeviceCapabilities]] = {}
        for device in context.topology.devices:
            self._alike.setdefault((device.dtypes, device.unsupported), []).append(device)
        self._order = dict.fromkeys(d.id for d in context.topology.devices)

    def able(self, nodes: Sequence[int], inputs: Sequence[int]) -> Mapping[str, None]:
        """Return the devices with the ops and dtypes of these nodes and of inputs that would be uploaded."""
        if len(self._alike) == 1 and (frozenset(), frozenset()) in self._alike:
            return self._order
        found: set[str] = set()
        for (dtypes, _), devices in self._alike.items():
            if any(lacking(self._context, node, devices[0]) for node in nodes):
                continue
            foreign = [v for v in inputs if dtypes and dtype_of(self._context.graph, v) not in dtypes]
            homes = {self._settled.get(storage_of(v), "") for v in foreign}
            found.update(d.id for d in devices if not homes or homes == {d.id})
        return {d: None for d in self._order if d in found}
