"""Colocation constraints: values that share storage, ops that write them, and random ops belong on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import RANDOM_STATE, storage_of

Homes = Mapping[int, str]


@attrs.define(eq=False)
class Colocation:
    """Groups of storages that must share a device, called blocks, and the nodes that run with them.

    A block's key is the number of one of its storages, the leader. A node without outputs and writes has no block: it
    may run on any device.

    Attributes:
        nodes: block by node. Nodes without a block are missing.
    """

    nodes: dict[int, int] = attrs.field(factory=dict)
    _leaders: dict[int, int] = attrs.field(factory=dict)

    def leader(self, storage: int) -> int:
        """Return the block that a storage belongs to."""
        leaders = self._leaders
        if storage not in leaders:
            return storage
        end = leaders[storage]
        while end in leaders:
            end = leaders[end]
        leaders[storage] = end
        return end

    def block(self, value: int) -> int:
        """Return the block of a value."""
        storage = storage_of(value)
        return self.leader(storage) if storage in self._leaders else storage

    def node(self, node: int) -> int | None:
        """Return the block of a node."""
        block = self.nodes.get(node)
        return None if block is None else self.leader(block)

    def unite(self, storage: int, other_storage: int) -> int:
        """Merge the blocks of two storages, and return the merged block."""
        leaders = self._leaders
        first = self.leader(storage) if storage in leaders else storage
        second = self.leader(other_storage) if other_storage in leaders else other_storage
        if first != second:
            leaders[second] = first
        return first

    def bind(self, node: Node, replace: Mapping[int, int]) -> None:
        """Merge the blocks of a node's outputs and writes: all of them are on the device of the node."""
        storages = [storage_of(v) for v in node.outputs]
        if node.writes:
            storages += [storage_of(replace.get(v, v)) for v in node.writes]
        if node.random:
            storages.append(RANDOM_STATE)
        if storages:
            self.nodes[node.id] = storages[0]
            for storage in storages[1:]:
                if storage != storages[0]:
                    self.unite(storages[0], storage)


def colocation_of(graph: Graph, nodes: Iterable[int], replace: Mapping[int, int]) -> Colocation:
    """Return the colocation blocks of the nodes that run. `replace` maps each replaced value to its substitute."""
    colocation = Colocation()
    graph_nodes, blocks = graph.nodes, colocation.nodes
    for number in nodes:
        node = graph_nodes[number]
        if len(node.outputs) == 1 and not node.writes and not node.random:  # as most do
            blocks[number] = storage_of(node.outputs[0])
        else:
            colocation.bind(node, replace)
    return colocation


def resident_blocks(blocks: Colocation, inputs: Sequence[int], resident: Homes) -> dict[int, str]:
    """Return the device of each block with storages on a device. If they are on several devices, return the first."""
    homes: dict[int, str] = {}
    if RANDOM_STATE in resident:
        homes[blocks.leader(RANDOM_STATE)] = resident[RANDOM_STATE]
    for value in inputs:
        home = resident.get(value)
        if home is not None:
            homes.setdefault(blocks.block(value), home)
    return homes


def storage_sizes(graph: Graph, values: Iterable[int]) -> dict[int, int]:
    """Return for each storage of `values` the bytes up to the last element that one of them accesses."""
    sizes: dict[int, int] = {}
    size_by_meta: dict[int, int] = {}
    for value in values:
        meta = graph.meta(value)
        size = size_by_meta.get(id(meta))
        if size is None:
            size = size_by_meta[id(meta)] = meta.extent * meta.dtype.itemsize
        storage = storage_of(value)
        if size > sizes.get(storage, -1):
            sizes[storage] = size
    return sizes


def homes_of_values(graph: Graph, nodes: Iterable[int], blocks: Colocation, homes: Homes) -> dict[int, str]:
    """Return the device of each input, and of each result of a running node: the home of its block."""
    graph_nodes = graph.nodes
    block = blocks.block
    values = {v: homes[block(v)] for v in graph.inputs}
    values.update([(v, homes[block(v)]) for node in nodes for v in graph_nodes[node].outputs])
    return values
