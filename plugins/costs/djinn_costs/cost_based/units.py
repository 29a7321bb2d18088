"""Divide a program into units, which run on one device because transfers between their nodes would cost too much.

A node joins a unit that has all its operands, if it is their only consumer or takes less time than a message.
Therefore values enter a unit only at its first node, and units have no cyclic dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from djinn.hooks import PlacementContext
from djinn.planning import Colocation, DataResidency, ExecutionPhase, Node, storage_of, storage_sizes
from djinn_costs.cost_based.hardware import Hardware

# Light units follow their first consumer regardless of free memory: they take at most this share of a device.
_SMALL: Final = 0.01
_TOKENS: Final = frozenset({ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE})


@attrs.define(eq=False)
class Unit:
    """Nodes that run on one device.

    Attributes:
        nodes: ids of the nodes, in order.
        seconds: time on each device model, as in `Hardware.rows`.
        storage: a storage that must be on the unit's device, or None if the unit only views inputs.
        bytes_by_unit: bytes that the unit gets from each other unit, by index of that unit.
        reads: storages of inputs that the unit reads.
        kept_bytes: bytes of its results that outlive the program.
        home: device of most of its inputs, or of the storage that it writes. None if these have no location.
        is_bound: True if the unit writes a storage on `home`.
        generates_tokens: True if the unit belongs to a language model that generates tokens.
        is_light: True if the unit and all its operands take less time than a message. A light unit runs on the device of
            its first consumer.
        group: index of its set of concurrent nodes in `beside(context)`, or -1.
    """

    nodes: list[int]
    seconds: list[float]
    storage: int | None = None
    bytes_by_unit: dict[int, int] = attrs.field(factory=dict)
    reads: set[int] = attrs.field(factory=set)
    kept_bytes: int = 0
    home: str | None = None
    is_bound: bool = False
    generates_tokens: bool = False
    is_light: bool = False
    group: int = -1


def beside(context: PlacementContext) -> tuple[tuple[int, ...], ...]:
    """Return sets of nodes that can run concurrently: groups of an optimization, or else branches of a pattern."""
    return context.plan.hints.get("groups") or context.plan.hints.get("branches", ())


@attrs.define(eq=False)
class ProgramUnits:
    """A program that is divided into units.

    Attributes:
        units: the units.
        view_nodes: nodes that only view inputs. They belong to no unit, and run on the devices of the inputs.
        blocks: sets of storages that must share a device.
        sizes: bytes of the inputs, by storage.
        homes: device of each input that has a location, by storage.
        weights: storages of weights that the program does not write. Other devices may copy them.
        tables: storages of large embedding tables. A look-up in such a table is a unit of its own.
    """

    units: list[Unit]
    view_nodes: list[int]
    blocks: Colocation
    sizes: Mapping[int, int]
    homes: Mapping[int, str]
    weights: set[int]
    tables: set[int] = attrs.field(factory=set)


def divide_program(
    context: PlacementContext, blocks: Colocation, hardware: Hardware, max_input_bytes: float, pieces: int = 0
) -> ProgramUnits:
    """Divide a program into units.

    Args:
        context: the program to place.
        blocks: sets of storages that must share a device. The inputs of each unit are united.
        hardware: devices and links.
        max_input_bytes: a unit that reads more bytes of inputs gets no further inputs.
        pieces: the maximum time of a unit is the program's time, divided by this number; 0 means no limit.
    """
    graph = context.graph
    sizes = storage_sizes(graph, graph.inputs)
    homes = {storage_of(v): home for v, home in context.resident.items() if storage_of(v) in sizes}
    written_storages = {storage_of(v) for n in context.plan.nodes for v in graph.nodes[n].writes}
    residency, weight = context.profile.residency, DataResidency.PERSISTENT_WEIGHT
    weights = {
        storage_of(v) for v in graph.inputs if residency.get(v) is weight and storage_of(v) not in written_storages
    }
    work = ProgramUnits([], [], blocks, sizes, homes, weights)
    _UnitBuilder(context, hardware, work, max_input_bytes, pieces).run()
    return work


class _UnitBuilder:
    def __init__(
        self, context: PlacementContext, hardware: Hardware, work: ProgramUnits, max_input_bytes: float, pieces: int
    ) -> None:
        self.graph, self.replace = context.graph, context.plan.replace
        self.nodes: Sequence[Node] = [context.graph.nodes[n] for n in context.plan.nodes]
        self.token_nodes = {n for n, phase in enumerate(context.profile.phases) if phase in _TOKENS}
        self.work, self.max_input_bytes = work, max_input_bytes
        self.rows = [[e.seconds for e in row] for row in hardware.rows]
        self.fastest_seconds = min(self.rows, key=math.fsum) if self.rows else []
        self.max_unit_seconds = math.fsum(self.fastest_seconds) / pieces if pieces else math.inf
        self.hop = hardware.hop if len(hardware.devices) > 1 else math.inf
        self.rate = hardware.rate
        self.small_bytes = _SMALL * min((d.memory for d in hardware.devices if d.memory), default=math.inf)
        self.outlives = frozenset(context.graph.outputs)
        self.unit_of: dict[int, int] = {}  # unit that computed each value
        self.last_writers: dict[int, int] = {}  # unit that last wrote each storage
        self.bytes: dict[int, int] = {}  # bytes of gathered inputs by unit
        self.use_counts: dict[int, int] = {}
        replace = self.replace
        self.operands = [tuple([replace.get(v, v) for v in n.inputs]) if replace else n.inputs for n in self.nodes]
        self.chain_seconds = self._measure_chains()
        self.groups = {node: number for number, nodes in enumerate(beside(context)) for node in nodes}
        has_several_devices = len(hardware.devices) > 1
        tables = {storage_of(v) for v in context.plan.hints.get("tables", ())} if has_several_devices else set()
        work.tables |= {s for s in tables if work.sizes.get(s, 0) > self.small_bytes}

    def _measure_chains(self) -> dict[int, float]:
        """Return for each node the seconds of the chain that starts at it. A node of a chain feeds only the next node.

        Also count the uses of each value in `use_counts`.
        """
        maker: dict[int, int] = {}
        followers: dict[int, int] = {}
        uses, quickest = self.use_counts, self.fastest_seconds
        for node, operands in zip(self.nodes, self.operands, strict=True):
            before, has_one_maker, number = -1, True, node.id
            for value in operands:
                uses[value] = uses.get(value, 0) + 1
                made_by = maker.get(value, before)
                if made_by != before:
                    has_one_maker = before == -1 and has_one_maker
                    before = made_by
            if before >= 0 and has_one_maker:
                followers[before] = number if before not in followers else -1
            for value in node.outputs:
                maker[value] = number
        branch: dict[int, float] = {}
        for node in reversed(self.nodes):
            number = node.id
            after = followers.get(number, -1)
            is_chained = after >= 0 and sum([uses.get(v, 0) for v in node.outputs]) == 1
            branch[number] = quickest[number] + branch[after] if is_chained else quickest[number]
        return branch

    def run(self) -> None:
        units, unit_of, last_writers, homes = self.work.units, self.unit_of, self.last_writers, self.work.homes
        for node, operands in zip(self.nodes, self.operands, strict=True):
            makers = {unit_of[v] for v in operands if v in unit_of}
            if last_writers:
                makers |= {last_writers[s] for v in operands if (s := storage_of(v)) in last_writers}
            if not makers and self._only_views_inputs(node):
                self.work.view_nodes.append(node.id)
                self.work.weights.difference_update([storage_of(v) for v in node.outputs])
                continue
            home, is_bound = self._home(node, operands) if homes else (None, False)
            index = self._unit_to_join(node, operands, makers, home)
            if index is None:
                light = (
                    home is None and all(units[m].is_light for m in makers) and self._is_light(node, operands, makers)
                )
                index, group = len(units), self.groups.get(node.id, -1)
                units.append(Unit([], [0.0] * len(self.rows), is_light=light and group < 0, group=group))
            self._add(units[index], index, node, operands)
            if home is not None and (units[index].home is None or is_bound):
                units[index].home = home
                units[index].is_bound |= is_bound

    def _only_views_inputs(self, node: Node) -> bool:
        """Return True if a node only returns views of inputs."""
        return bool(node.outputs) and not node.writes and all(storage_of(v) in self.work.sizes for v in node.outputs)

    def _unit_to_join(self, node: Node, operands: tuple[int, ...], makers: set[int], home: str | None) -> int | None:
        """Return the unit that a node joins. If it starts a new unit, return None."""
        units = self.work.units
        heavy_makers = [m for m in makers if not units[m].is_light] if len(makers) > 1 else list(makers)
        if len(heavy_makers) != 1:
            return None
        index = heavy_makers[0]
        unit = units[index]
        tables = self.work.tables
        if tables and not (unit.reads.isdisjoint(tables) and tables.isdisjoint(map(storage_of, operands))):
            return None  # rows leave the table's device, and dense work need not be there
        if self.groups and unit.group != self.groups.get(node.id, -1):
            return None
        if unit.is_light and (home is not None or not self._is_light(node, operands, {index})):
            return None
        if home is not None and unit.home is not None and home != unit.home:
            return None
        if (
            self.max_unit_seconds < math.inf
            and min(unit.seconds) + self.fastest_seconds[node.id] > self.max_unit_seconds
        ):
            return None
        if self.max_input_bytes < math.inf:
            new_bytes = self._new_input_bytes(unit, operands)
            if new_bytes and self.bytes.get(index, 0) + new_bytes > self.max_input_bytes:
                return None
        if self.chain_seconds[node.id] > self.hop:
            for value in operands:
                if self.unit_of.get(value) == index and self.use_counts[value] > 1:
                    return None
        return index

    def _is_light(self, node: Node, operands: tuple[int, ...], makers: set[int]) -> bool:
        """Return True if a node and its operands take less time than a message, and their values are small."""
        before = sum(sum(self.work.units[m].seconds[:1]) for m in makers)
        size = sum(self.work.sizes.get(storage_of(v), 0) for v in operands)
        if before + self.chain_seconds[node.id] + size / self.rate > self.hop:
            return False
        return size + sum(self.graph.meta(v).nbytes for v in node.outputs) <= self.small_bytes

    def _new_input_bytes(self, unit: Unit, operands: tuple[int, ...]) -> int:
        sizes, new_bytes = self.work.sizes, 0
        for value in operands:
            if storage_of(value) in sizes and storage_of(value) not in unit.reads:
                new_bytes += sizes[storage_of(value)]
        return new_bytes

    def _home(self, node: Node, operands: tuple[int, ...]) -> tuple[str | None, bool]:
        """Return the device of the inputs that a node uses, or None, and True if the node writes or views them."""
        homes, sizes = self.work.homes, self.work.sizes
        for value in node.writes:
            home = homes.get(storage_of(self.replace.get(value, value)))
            if home is not None:
                return home, True
        placed_storages = [s for v in operands if (s := storage_of(v)) in homes]
        if not placed_storages:
            return None, False
        views = {storage_of(v) for v in node.outputs}
        viewed_storages = [s for s in placed_storages if s in views]
        return homes[max(viewed_storages or placed_storages, key=lambda s: sizes[s])], bool(viewed_storages)

    def _add(self, unit: Unit, index: int, node: Node, operands: tuple[int, ...]) -> None:
        number = node.id
        unit.nodes.append(number)
        for row, seconds in enumerate(self.rows):
            unit.seconds[row] += seconds[number]
        self._record_reads(unit, index, operands)
        blocks = self.work.blocks
        block = blocks.nodes.get(number)
        if block is not None:
            if unit.storage is None:
                unit.storage = blocks.leader(block)
            else:
                blocks.unite(unit.storage, block)
        for value in node.outputs:
            self.unit_of[value] = index
            if value in self.outlives and storage_of(value) not in self.work.sizes:
                unit.kept_bytes += self.graph.meta(value).nbytes
        for value in node.writes:
            self.last_writers[storage_of(self.replace.get(value, value))] = index
        unit.generates_tokens = unit.generates_tokens or number in self.token_nodes

    def _record_reads(self, unit: Unit, index: int, operands: tuple[int, ...]) -> None:
        """Record the inputs that a unit reads, and the operands that it gets from other units."""
        sizes, unit_of, last_writers = self.work.sizes, self.unit_of, self.last_writers
        for value in operands:
            storage = storage_of(value)
            if storage in sizes and storage not in unit.reads:
                unit.reads.add(storage)
                self.bytes[index] = self.bytes.get(index, 0) + sizes[storage]
            maker = unit_of.get(value, index)
            if maker != index:
                unit.bytes_by_unit[maker] = unit.bytes_by_unit.get(maker, 0) + self.graph.meta(value).nbytes
            if last_writers and (writer := last_writers.get(storage, index)) != index:
                unit.bytes_by_unit.setdefault(writer, 0)
