"""Colocation constraints: values that share storage, ops that make or write them, and random ops belong on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import RANDOM_STATE, storage_of

Homes = Mapping[int, str]


@attrs.define(eq=False)
class Colocation:
    """Blocks of storages, each of which has one home, and the nodes that run there.

    A block is called by the number of one of its storages, its leader. A node that makes and writes nothing has no block:
    it may run anywhere.

    Attributes:
        nodes: block by node, for the nodes that have one.
    """

    nodes: dict[int, int] = attrs.field(factory=dict)
    _leaders: dict[int, int] = attrs.field(factory=dict)

    def leader(self, storage: int) -> int:
        """The block that a storage belongs to."""
        leaders = self._leaders
        if storage not in leaders:
            return storage
        end = leaders[storage]
        while end in leaders:
            end = leaders[end]
        leaders[storage] = end
        return end

    def block(self, value: int) -> int:
        """The block that a value lives in."""
        storage = storage_of(value)
        return self.leader(storage) if storage in self._leaders else storage

    def node(self, node: int) -> int | None:
        """The block that a node runs with."""
        block = self.nodes.get(node)
        return None if block is None else self.leader(block)

    def unite(self, one: int, other: int) -> int:
        """Make one block of the blocks of two storages; returns it."""
        leaders = self._leaders
        first = self.leader(one) if one in leaders else one
        second = self.leader(other) if other in leaders else other
        if first != second:
            leaders[second] = first
        return first

    def bind(self, node: Node, replace: Mapping[int, int]) -> None:
        """Unite the blocks of a node's outputs and writes: it makes and writes them on the device where it runs."""
        bound = [storage_of(v) for v in node.outputs]
        if node.writes:
            bound += [storage_of(replace.get(v, v)) for v in node.writes]
        if node.random:
            bound.append(RANDOM_STATE)
        if bound:
            self.nodes[node.id] = bound[0]
            for storage in bound[1:]:
                if storage != bound[0]:
                    self.unite(bound[0], storage)


def together(graph: Graph, nodes: Iterable[int], replace: Mapping[int, int]) -> Colocation:
    """Colocation blocks of the nodes of a graph that run, where values in `replace` stand for others."""
    found = Colocation()
    every, bound = graph.nodes, found.nodes
    for number in nodes:
        node = every[number]
        if len(node.outputs) == 1 and not node.writes and not node.random:  # as most do
            bound[number] = storage_of(node.outputs[0])
        else:
            found.bind(node, replace)
    return found


def resident_blocks(blocks: Colocation, inputs: Sequence[int], resident: Homes) -> dict[int, str]:
    """Device by block, for blocks with storages that already live somewhere; the first of them where they disagree."""
    homes: dict[int, str] = {}
    if RANDOM_STATE in resident:
        homes[blocks.leader(RANDOM_STATE)] = resident[RANDOM_STATE]
    for value in inputs:
        home = resident.get(value)
        if home is not None:
            homes.setdefault(blocks.block(value), home)
    return homes


def storage_sizes(graph: Graph, values: Iterable[int]) -> dict[int, int]:
    """Bytes by storage, as far as the program looks into them."""
    sizes: dict[int, int] = {}
    known: dict[int, int] = {}
    for value in values:
        meta = graph.meta(value)
        size = known.get(id(meta))
        if size is None:
            size = known[id(meta)] = meta.extent * meta.dtype.itemsize
        storage = storage_of(value)
        if size > sizes.get(storage, -1):
            sizes[storage] = size
    return sizes


def homes_of_values(graph: Graph, nodes: Iterable[int], blocks: Colocation, homes: Homes) -> dict[int, str]:
    """Device by value, for the inputs of a graph and what those of its nodes make: that of the value's block."""
    every = graph.nodes
    block = blocks.block
    values = {v: homes[block(v)] for v in graph.inputs}
    values.update([(v, homes[block(v)]) for node in nodes for v in every[node].outputs])
    return values
