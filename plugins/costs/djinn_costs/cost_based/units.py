"""Divide a program into units, which run on one device because transfers between their nodes would cost too much.

A node joins the unit of its operands if all of them are in one unit, and if the node is their only consumer or takes
less time than a message. Therefore values enter a unit only at its first node, and units have no cyclic dependencies.
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
        storage: a storage that lies on the unit's device. If the unit computes and writes nothing, it is None.
        needs: bytes that the unit gets from other units, by unit.
        reads: storages of inputs that the unit reads.
        kept: bytes of results that outlive the program.
        home: device of most of its inputs, or of the storage that it writes. If these have no location, it is None.
        bound: True if the unit writes a storage on `home`.
        tokens: True if the unit belongs to a language model that generates tokens.
        light: True if the unit and all its operands take less time than a message. A light unit runs on the device of
            its first consumer.
        group: index of its group or branch in `beside`. Without a group, it is -1.
    """

    nodes: list[int]
    seconds: list[float]
    storage: int | None = None
    needs: dict[int, int] = attrs.field(factory=dict)
    reads: set[int] = attrs.field(factory=set)
    kept: int = 0
    home: str | None = None
    bound: bool = False
    tokens: bool = False
    light: bool = False
    group: int = -1


def beside(context: PlacementContext) -> tuple[tuple[int, ...], ...]:
    """Return sets of nodes that can run concurrently.

    The sets are groups that an optimization has made. If there are none, they are branches that a pattern has found.
    """
    return context.plan.hints.get("groups") or context.plan.hints.get("branches", ())


@attrs.define(eq=False)
class ProgramUnits:
    """A program that is divided into units.

    Attributes:
        units: the units.
        loose: nodes that only view inputs. They belong to no unit, and run on the devices of the inputs.
        blocks: sets of storages that must share a device.
        sizes: bytes of the inputs, by storage.
        homes: device of each input that has a location, by storage.
        weights: storages of weights that the program does not write. Other devices may copy them.
        tables: storages of large embedding tables. A look-up in such a table is a unit of its own.
    """

    units: list[Unit]
    loose: list[int]
    blocks: Colocation
    sizes: Mapping[int, int]
    homes: Mapping[int, str]
    weights: set[int]
    tables: set[int] = attrs.field(factory=set)


def work_of(
    context: PlacementContext, blocks: Colocation, hardware: Hardware, heavy: float, pieces: int = 0
) -> ProgramUnits:
    """Divide a program into units.

    Args:
        context: the program to place.
        blocks: sets of storages that must share a device. The inputs of each unit are united.
        hardware: devices and links.
        heavy: a unit that reads more bytes of inputs gets no further inputs.
        pieces: the program's time is divided by this number, which is the maximum time of a unit. If 0, there is no
            limit.
    """
    graph = context.graph
    sizes = storage_sizes(graph, graph.inputs)
    homes = {storage_of(v): home for v, home in context.resident.items() if storage_of(v) in sizes}
    written = {storage_of(v) for n in context.plan.nodes for v in graph.nodes[n].writes}
    residency, weight = context.profile.residency, DataResidency.PERSISTENT_WEIGHT
    weights = {storage_of(v) for v in graph.inputs if residency.get(v) is weight and storage_of(v) not in written}
    work = ProgramUnits([], [], blocks, sizes, homes, weights)
    _Gathering(context, hardware, work, heavy, pieces).run()
    return work


class _Gathering:
    def __init__(
        self, context: PlacementContext, hardware: Hardware, work: ProgramUnits, heavy: float, pieces: int
    ) -> None:
        self.graph, self.replace = context.graph, context.plan.replace
        self.nodes: Sequence[Node] = [context.graph.nodes[n] for n in context.plan.nodes]
        self.tokens = {n for n, phase in enumerate(context.profile.phases) if phase in _TOKENS}
        self.work, self.heavy = work, heavy
        self.rows = [[e.seconds for e in row] for row in hardware.rows]
        self.quickest = min(self.rows, key=math.fsum) if self.rows else []
        self.longest = math.fsum(self.quickest) / pieces if pieces else math.inf
        self.hop = hardware.hop if len(hardware.devices) > 1 else math.inf
        self.rate = hardware.rate
        self.small = _SMALL * min((d.memory for d in hardware.devices if d.memory), default=math.inf)
        self.outlives = frozenset(context.graph.outputs)
        self.unit_of: dict[int, int] = {}  # unit that computed each value
        self.written: dict[int, int] = {}  # unit that last wrote each storage
        self.bytes: dict[int, int] = {}  # bytes of gathered inputs by unit
        self.uses: dict[int, int] = {}
        replace = self.replace
        self.used = [tuple([replace.get(v, v) for v in n.inputs]) if replace else n.inputs for n in self.nodes]
        self.branch = self._branches()
        self.groups = {node: number for number, nodes in enumerate(beside(context)) for node in nodes}
        several = len(hardware.devices) > 1
        tables = {storage_of(v) for v in context.plan.hints.get("tables", ())} if several else set()
        work.tables |= {s for s in tables if work.sizes.get(s, 0) > self.small}

    def _branches(self) -> dict[int, float]:
        """Return for each node the seconds of the chain that starts at the node. Each node of a chain has one consumer.

        Also count the uses of each value.
        """
        maker: dict[int, int] = {}
        follower: dict[int, int] = {}
        uses, quickest = self.uses, self.quickest
        for node, used in zip(self.nodes, self.used, strict=True):
            before, single, number = -1, True, node.id
            for value in used:
                uses[value] = uses.get(value, 0) + 1
                made_by = maker.get(value, before)
                if made_by != before:
                    single = before == -1 and single
                    before = made_by
            if before >= 0 and single:
                follower[before] = number if before not in follower else -1
            for value in node.outputs:
                maker[value] = number
        branch: dict[int, float] = {}
        for node in reversed(self.nodes):
            number = node.id
            after = follower.get(number, -1)
            alone = after >= 0 and sum([uses.get(v, 0) for v in node.outputs]) == 1
            branch[number] = quickest[number] + branch[after] if alone else quickest[number]
        return branch

    def run(self) -> None:
        units, unit_of, written, homes = self.work.units, self.unit_of, self.written, self.work.homes
        for node, used in zip(self.nodes, self.used, strict=True):
            makers = {unit_of[v] for v in used if v in unit_of}
            if written:
                makers |= {written[s] for v in used if (s := storage_of(v)) in written}
            if not makers and self._only_looks(node):
                self.work.loose.append(node.id)
                self.work.weights.difference_update([storage_of(v) for v in node.outputs])
                continue
            home, bound = self._home(node, used) if homes else (None, False)
            index = self._joined(node, used, makers, home)
            if index is None:
                light = home is None and all(units[m].light for m in makers) and self._is_light(node, used, makers)
                index, group = len(units), self.groups.get(node.id, -1)
                units.append(Unit([], [0.0] * len(self.rows), light=light and group < 0, group=group))
            self._add(units[index], index, node, used)
            if home is not None and (units[index].home is None or bound):
                units[index].home = home
                units[index].bound |= bound

    def _only_looks(self, node: Node) -> bool:
        """Return True if a node only returns views of inputs."""
        return bool(node.outputs) and not node.writes and all(storage_of(v) in self.work.sizes for v in node.outputs)

    def _joined(self, node: Node, used: tuple[int, ...], makers: set[int], home: str | None) -> int | None:
        """Return the unit that a node joins. If it starts a new unit, return None."""
        units = self.work.units
        serious = [m for m in makers if not units[m].light] if len(makers) > 1 else list(makers)
        if len(serious) != 1:
            return None
        index = serious[0]
        unit = units[index]
        tables = self.work.tables
        if tables and not (unit.reads.isdisjoint(tables) and tables.isdisjoint(map(storage_of, used))):
            return None  # rows leave the table's device, and dense work need not be there
        if self.groups and unit.group != self.groups.get(node.id, -1):
            return None
        if unit.light and (home is not None or not self._is_light(node, used, {index})):
            return None
        if home is not None and unit.home is not None and home != unit.home:
            return None
        if self.longest < math.inf and min(unit.seconds) + self.quickest[node.id] > self.longest:
            return None
        if self.heavy < math.inf:
            fresh = self._fresh(unit, used)
            if fresh and self.bytes.get(index, 0) + fresh > self.heavy:
                return None
        if self.branch[node.id] > self.hop:
            for value in used:
                if self.unit_of.get(value) == index and self.uses[value] > 1:
                    return None
        return index

    def _is_light(self, node: Node, used: tuple[int, ...], makers: set[int]) -> bool:
        """Return True if a node and its operands take less time than a message, and their values are small."""
        before = sum(sum(self.work.units[m].seconds[:1]) for m in makers)
        size = sum(self.work.sizes.get(storage_of(v), 0) for v in used)
        if before + self.branch[node.id] + size / self.rate > self.hop:
            return False
        return size + sum(self.graph.meta(v).nbytes for v in node.outputs) <= self.small

    def _fresh(self, unit: Unit, used: tuple[int, ...]) -> int:
        sizes, fresh = self.work.sizes, 0
        for value in used:
            if storage_of(value) in sizes and storage_of(value) not in unit.reads:
                fresh += sizes[storage_of(value)]
        return fresh

    def _home(self, node: Node, used: tuple[int, ...]) -> tuple[str | None, bool]:
        """Return the device of the inputs that a node writes or reads, and True if the node writes them."""
        homes, sizes = self.work.homes, self.work.sizes
        for value in node.writes:
            home = homes.get(storage_of(self.replace.get(value, value)))
            if home is not None:
                return home, True
        placed = [s for v in used if (s := storage_of(v)) in homes]
        if not placed:
            return None, False
        views = {storage_of(v) for v in node.outputs}
        bound = [s for s in placed if s in views]
        return homes[max(bound or placed, key=lambda s: sizes[s])], bool(bound)

    def _add(self, unit: Unit, index: int, node: Node, used: tuple[int, ...]) -> None:
        number = node.id
        unit.nodes.append(number)
        for row, seconds in enumerate(self.rows):
            unit.seconds[row] += seconds[number]
        self._take(unit, index, used)
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
                unit.kept += self.graph.meta(value).nbytes
        for value in node.writes:
            self.written[storage_of(self.replace.get(value, value))] = index
        unit.tokens = unit.tokens or number in self.tokens

    def _take(self, unit: Unit, index: int, used: tuple[int, ...]) -> None:
        """Record the inputs that a unit reads, and the operands that it gets from other units."""
        sizes, unit_of, written = self.work.sizes, self.unit_of, self.written
        for value in used:
            storage = storage_of(value)
            if storage in sizes and storage not in unit.reads:
                unit.reads.add(storage)
                self.bytes[index] = self.bytes.get(index, 0) + sizes[storage]
            maker = unit_of.get(value, index)
            if maker != index:
                unit.needs[maker] = unit.needs.get(maker, 0) + self.graph.meta(value).nbytes
            if written and (writer := written.get(storage, index)) != index:
                unit.needs.setdefault(writer, 0)
