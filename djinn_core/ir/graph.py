"""The graph: a view of a program with data edges and the ordering edges of mutation and randomness."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Literal

import attrs
import msgspec

from djinn_core.ir.checked_fields import read_only
from djinn_core.ir.flow import Flow
from djinn_core.ir.form import Form
from djinn_core.ir.handles import RANDOM_STATE, storage_of, storages_of
from djinn_core.ir.module_names import ModuleNames, module_names
from djinn_core.ir.operators import OWN_OPERATORS
from djinn_core.ir.program import Program, Slot
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.ir.values import TensorMeta

EdgeKind = Literal["data", "order"]


_NAMED = 8  # number of op kinds in a graph's `repr`


@attrs.frozen
class Node:
    """A graph node: one op call.

    Attributes:
        id: position in program order.
        op: overload name, such as `aten::mm`.
        inputs: value ids of the tensor operands.
        outputs: value ids of new results. A result that is one of the inputs (in place) is not listed.
        writes: value ids that the op writes into.
        slots: scalars of the op.
        random: True if the op reads and advances the random state.
        module: path of the `nn.Module` that issued the op, or an empty string.
        form: the form of the call: the positions of inputs and slots, and the constants.
            `djinn.planning.arguments(node)` returns the arguments by their schema names.
        operation: the op without its namespace and overload: `mm` for `aten::mm`.
    """

    id: int
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()
    slots: tuple[Slot, ...] = ()
    random: bool = False
    module: str = ""
    form: Form = attrs.field(kw_only=True, repr=False)
    operation: str = attrs.field(init=False, repr=False, eq=False)  # cached, because matchers mostly ask for this

    @operation.default
    def _operation_name(self) -> str:
        return _operation(self.op)


@lru_cache(maxsize=4096)
def _operation(op: str) -> str:
    return op.rsplit("::", maxsplit=1)[-1].split(".", maxsplit=1)[0]


@attrs.frozen
class Edge:
    """A dependence: `target` must run after `source`, because of data flow, mutation or randomness.

    Attributes:
        source: id of the node that runs first.
        target: id of the node that runs later.
        kind: `data`, or `order` for mutation and randomness.
    """

    source: int
    target: int
    kind: EdgeKind


@attrs.define(eq=False, slots=False, repr=False)
class Graph(ShortRepr):
    """A view of a program for patterns, cost models, optimizations, placement and scheduling.

    Attributes:
        program: the program.
        modules: module path by node, if the program itself does not record it.
    """

    program: Program
    modules: Mapping[int, str] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        counts = Counter(call.signature.form.op.partition("::")[2].partition(".")[0] for call in self.program.calls)
        op_counts = ", ".join(f"{op} {count:,}" for op, count in counts.most_common(_NAMED))
        return f"Graph({len(self.program):,} ops{': ' + op_counts if op_counts else ''}{', ...' if len(counts) > _NAMED else ''})"

    @cached_property
    def module_names(self) -> ModuleNames:
        """Paths and classes of the modules that issued the ops, for modules that still exist."""
        return ModuleNames(dict(self.modules)) if self.modules else module_names(self.program.modules)

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """Nodes in program order."""
        return tuple(self._build_nodes())

    def _build_nodes(self) -> Iterator[Node]:
        names, operands, numbers = self.module_names.paths, self.program.operands, self.program.slots
        at = slot = 0
        for index, call in enumerate(self.program.calls):
            middle, last = at + call.operand_count, slot + call.slot_count
            end = middle + call.new_count
            inputs, form = operands[at:middle], call.signature.form
            yield Node(
                id=index,
                op=form.op,
                inputs=inputs,
                outputs=operands[middle:end],
                writes=tuple([inputs[i] for i in call.writes]) if call.writes else (),
                slots=numbers[slot:last],
                random=call.random or form.op in OWN_OPERATORS,
                module=names.get(index, ""),
                form=form,
            )
            at, slot = end, last

    @cached_property
    def rejected_nodes(self) -> frozenset[int]:
        """Nodes that PyTorch rejects on the client. Their results are unknown until the executor answers."""
        return frozenset([index for index, call in enumerate(self.program.calls) if call.refused])

    @cached_property
    def edges(self) -> Sequence[Edge]:
        """All dependences: data edges from a value's producer or last writer to its readers, and order edges.

        An order edge leads from a reader to the next writer.
        """
        return tuple([Edge(source, target, kind) for (source, target), kind in self._edge_kinds.items()])

    @property
    def pairs(self) -> Collection[tuple[int, int]]:
        """Source and target of all edges, as plain numbers."""
        return self._edge_kinds.keys()

    @cached_property
    def _edge_kinds(self) -> Mapping[tuple[int, int], EdgeKind]:
        return _edges(self.nodes)

    @cached_property
    def _metas(self) -> dict[int, TensorMeta]:
        metas: dict[int, TensorMeta] = {}
        for node, call in zip(self.nodes, self.program.calls, strict=True):
            for value, meta in zip(node.inputs, call.operands, strict=True):
                earlier = metas.get(value)
                # If a shape depends on data, only users of the result know it.
                if earlier is None or (earlier is not meta and not earlier.shape):
                    metas[value] = meta
            if node.outputs:
                new_metas = [
                    m for m, operand in zip(call.results, call.inplace, strict=True) if m is not None and operand < 0
                ]
                metas.update(zip(node.outputs, new_metas, strict=True))
        return metas

    @cached_property
    def distinct_metas(self) -> frozenset[TensorMeta]:
        """The distinct metadata of the values."""
        return frozenset(self._metas.values())

    @cached_property
    def bytes_of_storages(self) -> int:
        """Total bytes of all storages, each up to the last accessed element."""
        sizes: dict[int, int] = {}
        size_by_meta: dict[TensorMeta, int] = {}
        metas = self._metas
        for storage, meta in zip(storages_of(metas), metas.values(), strict=True):
            size = size_by_meta.get(meta)
            if size is None:
                size = size_by_meta[meta] = meta.extent * meta.dtype.itemsize
            if size > sizes.get(storage, -1):
                sizes[storage] = size
        return sum(sizes.values())

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
        produced = self._producers
        return tuple(dict.fromkeys([v for node in self.nodes for v in node.inputs if v not in produced]))

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Values that the program makes and that are alive when it ends, in order."""
        dead = self.program.dead
        return tuple([v for v in self._producers if v not in dead])

    @cached_property
    def by_op(self) -> Mapping[str, Sequence[int]]:
        """Node ids by op without namespace and overload, in order."""
        index: dict[str, list[int]] = defaultdict(list)
        for node in self.nodes:
            index[node.operation].append(node.id)
        return read_only(index)

    def meta(self, value: int) -> TensorMeta:
        """Metadata of a value.

        Raises:
            KeyError: the graph has no such value.
        """
        return self._metas[value]

    def get_node_by_id(self, node: int) -> Node | None:
        """The node with an id, or None if the graph has no such node."""
        return self.nodes[node] if 0 <= node < len(self.nodes) else None

    def producer(self, value: int) -> Node | None:
        """The node that makes a value, or None for an input."""
        return self._producers.get(value)

    def consumers(self, value: int) -> Sequence[Node]:
        """The nodes that use a value, in order."""
        return self._consumers.get(value, ())

    @cached_property
    def flow(self) -> Flow:
        """The data flow from op to op, past views, casts and copies."""
        return Flow(self)

    @cached_property
    def topology_hash(self) -> str:
        """Hash of forms and data flow, without sizes and scalars."""
        return topology_hash(self)

    @cached_property
    def shape_hash(self) -> str:
        """Hash of the metadata of all values, in order of appearance."""
        return shape_hash(self, self._metas)


class _EdgeBuilder:
    """Build edges from the producer of each value, the last writer of each storage, and its readers since then."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.makers: dict[int, int] = {}
        self.writers: dict[int, int] = {}
        self.readers: dict[int, list[int]] = {s: [] for node in nodes for s in storages_written(node)}
        self.edges: dict[tuple[int, int], EdgeKind] = {}

    def add_node(self, node: Node) -> None:
        """Add the edges into `node`, and record the storages that it reads, writes and creates."""
        edges, makers, writers, target = self.edges, self.makers, self.writers, node.id
        for value in node.inputs:
            source = makers.get(value)  # the value itself: a view exists only once the view op has run
            if source is not None:
                edges[source, target] = "data"
        read = storages_of(node.inputs)
        if node.random:
            read.append(RANDOM_STATE)
        for storage in read:
            source = writers.get(storage)
            if source is not None:
                edges[source, target] = "data"
        if self.readers:
            self._add_writes(node, read)
        read_storages = read if len(node.outputs) < 2 else frozenset(read)
        for value, storage in zip(node.outputs, storages_of(node.outputs), strict=True):
            makers[value] = target
            if storage not in writers and storage not in read_storages:  # a view does not write its base
                writers[storage] = target

    def _add_writes(self, node: Node, read: Sequence[int]) -> None:
        written_storages = storages_written(node)
        for storage in written_storages:
            for reader in self.readers[storage]:
                self.edges.setdefault((reader, node.id), "order")
            self.readers[storage] = []
            self.writers[storage] = node.id
        for storage in dict.fromkeys(read):
            if storage in self.readers and storage not in written_storages:
                self.readers[storage].append(node.id)


def storages_written(node: Node) -> dict[int, None]:
    """Return the storages that `node` writes in place, including the random state, as an ordered set."""
    if not node.writes and not node.random:
        return {}
    random = (RANDOM_STATE,) if node.random else ()
    return dict.fromkeys((*storages_of(node.writes), *random))


def _edges(nodes: Sequence[Node]) -> dict[tuple[int, int], EdgeKind]:
    builder = _EdgeBuilder(nodes)
    for node in nodes:
        builder.add_node(node)
    return builder.edges


def topology_hash(graph: Graph) -> str:
    """Return the BLAKE2 hash over forms and data flow, with values and storages numbered by first appearance.

    The hash is stable across runs and processes. It includes which values share memory, because mutation edges follow
    from shared memory.
    """
    values: dict[int, int] = {}
    storages: dict[int, int] = {}
    forms: dict[int, bytes] = {}
    digest = hashlib.blake2b(digest_size=16)
    for node in graph.nodes:
        # Many nodes share a form, so forms are looked up by identity.
        digest.update(forms.get(id(node.form)) or forms.setdefault(id(node.form), _encode_form(node.form)))
        for group in (node.inputs, node.outputs, node.writes):
            flow = [
                (values.setdefault(v, len(values)), storages.setdefault(storage_of(v), len(storages))) for v in group
            ]
            digest.update(f"{flow}".encode())
        digest.update(b"r" if node.random else b";")
    return digest.hexdigest()


_encode_form = msgspec.msgpack.Encoder().encode


def shape_hash(graph: Graph, metas: Mapping[int, TensorMeta]) -> str:
    """Return the BLAKE2 hash over the metadata of all values in order of first appearance."""
    digest = hashlib.blake2b(digest_size=16)
    for value in dict.fromkeys(v for node in graph.nodes for v in (*node.inputs, *node.outputs)):
        digest.update(f"{fields(metas[value])};".encode())
    return digest.hexdigest()


def fields(meta: TensorMeta) -> tuple[object, ...]:
    """Return the fields of `meta`. Metadata with equal fields is equal, even if it was interned separately."""
    return (meta.shape, meta.stride, meta.offset, str(meta.dtype), meta.device, meta.conj, meta.neg)
