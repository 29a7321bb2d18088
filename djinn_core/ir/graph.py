"""The graph: a view of a program with data edges and the ordering that mutation and randomness demand."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import attrs

from djinn_core.ir.program import Program, Slot
from djinn_core.ir.values import RANDOM_STATE, TensorMeta, storage_of

EdgeKind = Literal["data", "order"]


@attrs.frozen
class Node:
    """One op.

    Attributes:
        id: position in program order.
        op: overload name, such as `aten::mm`.
        inputs, outputs: value ids; an output that is one of the inputs (in place) is not listed.
        writes: value ids that the op writes into.
        slots: its scalars.
        random: whether it reads and advances the random state.
        module: path of the `nn.Module` that issued it, or an empty string.
    """

    id: int
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    random: bool = False
    module: str = ""

    @property
    def operation(self) -> str:
        """The op without its namespace and overload: `mm` for `aten::mm`."""
        return self.op.split("::")[-1].split(".")[0]


@attrs.frozen
class Edge:
    """`target` must run after `source`: it uses its data, or mutation or randomness orders them."""

    source: int
    target: int
    kind: EdgeKind


@runtime_checkable
class Graph(Protocol):
    """What patterns, cost models, optimizations, placement and scheduling see, whatever it was made from."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes in an order in which they may run."""

    @property
    def edges(self) -> Sequence[Edge]:
        """Data and ordering edges, without duplicates."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Values that the graph uses and does not make."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Values that the graph makes and somebody still holds at its end."""

    @property
    def by_op(self) -> Mapping[str, Sequence[int]]:
        """Node ids by op without namespace and overload (`mm`), in order."""

    def meta(self, value: int) -> TensorMeta:
        """Metadata of a value."""

    def producer(self, value: int) -> Node | None:
        """The node that makes a value, or None for an input."""

    def consumers(self, value: int) -> Sequence[Node]:
        """The nodes that use a value, in order."""

    @property
    def topology_hash(self) -> str:
        """Hash of ops and data flow, without sizes and scalars; the same in every process."""

    @property
    def shape_hash(self) -> str:
        """Hash of the metadata of all values, in order of appearance; the same in every process."""


@attrs.define(eq=False, slots=False)
class ProgramGraph:
    """The graph of a program."""

    program: Program
    modules: Mapping[int, str] = attrs.field(factory=dict)

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """Nodes in program order."""
        return tuple(
            Node(
                i.index, i.op, i.inputs, i.outputs, i.writes, i.slots, i.call.random, self.modules.get(i.index, "")
            )
            for i in self.program.instructions()
        )

    @cached_property
    def edges(self) -> Sequence[Edge]:
        """Data edges from the last writer of what a node reads; order edges from readers to the next writer."""
        return tuple(_edges(self.nodes))

    @cached_property
    def _metas(self) -> dict[int, TensorMeta]:
        metas: dict[int, TensorMeta] = {}
        for node, call in zip(self.nodes, self.program.calls, strict=True):
            for value, meta in zip(node.inputs, call.operands, strict=True):
                metas.setdefault(value, meta)
            made = [m for m, same in zip(call.results, call.inplace, strict=True) if m is not None and same < 0]
            metas.update(zip(node.outputs, made, strict=True))
        return metas

    @cached_property
    def _producers(self) -> dict[int, Node]:
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def _consumers(self) -> dict[int, list[Node]]:
        users: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                users[value].append(node)
        return users

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that the program uses and does not make, in order of first use."""
        used = (value for node in self.nodes for value in node.inputs)
        return tuple(dict.fromkeys(v for v in used if v not in self._producers))

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Values that the program makes and that are alive when it ends, in order."""
        return tuple(v for v in self._producers if v not in self.program.dead)

    @cached_property
    def by_op(self) -> Mapping[str, Sequence[int]]:
        """Node ids by op without namespace and overload, in order."""
        index: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            index[node.operation].append(node.id)
        return index

    def meta(self, value: int) -> TensorMeta:
        """Metadata of a value.

        Raises:
            KeyError: the graph has no such value.
        """
        return self._metas[value]

    def producer(self, value: int) -> Node | None:
        """The node that makes a value, or None for an input."""
        return self._producers.get(value)

    def consumers(self, value: int) -> Sequence[Node]:
        """The nodes that use a value, in order."""
        return self._consumers.get(value, ())

    @cached_property
    def topology_hash(self) -> str:
        """Hash of forms and data flow, without sizes and scalars."""
        return topology_hash(self)

    @cached_property
    def shape_hash(self) -> str:
        """Hash of the metadata of all values, in order of appearance."""
        return shape_hash(self, self._metas)


def _edges(nodes: Sequence[Node]) -> list[Edge]:
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    edges: dict[tuple[int, int], Edge] = {}

    def add(source: int, target: int, kind: EdgeKind) -> None:
        if source != target and (kind == "data" or (source, target) not in edges):
            edges[source, target] = Edge(source, target, kind)

    for node in nodes:
        random = [RANDOM_STATE] if node.random else []
        written = {storage_of(v) for v in node.writes} | set(random)
        for storage in dict.fromkeys([*map(storage_of, node.inputs), *random]):
            if storage in writer:
                add(writer[storage], node.id, "data")
        for storage in written:
            for reader in readers.pop(storage, ()):
                add(reader, node.id, "order")
            writer[storage] = node.id
        for storage in {storage_of(v) for v in node.inputs} - written:
            readers[storage].append(node.id)
        for value in node.outputs:
            writer.setdefault(storage_of(value), node.id)
            if storage_of(value) not in {storage_of(v) for v in node.inputs}:
                continue
            add(writer[storage_of(value)], node.id, "data")
    return list(edges.values())


def topology_hash(graph: Graph) -> str:
    """BLAKE2 over ops and data flow with values numbered by first appearance: stable across runs and processes."""
    numbers: dict[int, int] = {}
    digest = hashlib.blake2b(digest_size=16)
    for node in graph.nodes:
        flow = [numbers.setdefault(v, len(numbers)) for v in (*node.inputs, -1, *node.outputs, -1, *node.writes)]
        digest.update(f"{node.op}{flow}{len(node.slots)};".encode())
    return digest.hexdigest()


def shape_hash(graph: Graph, metas: Mapping[int, TensorMeta]) -> str:
    """BLAKE2 over the metadata of all values in order of first appearance."""
    digest = hashlib.blake2b(digest_size=16)
    for value in dict.fromkeys(v for node in graph.nodes for v in (*node.inputs, *node.outputs)):
        meta = metas[value]
        digest.update(f"{meta.shape}{meta.stride}{meta.offset}{meta.dtype}{meta.device};".encode())
    return digest.hexdigest()
