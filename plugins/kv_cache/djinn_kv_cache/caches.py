"""Find the KV caches of a program: buffers that it writes into, and tensors that it extends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs
import torch

from djinn.planning import COPIES, Graph, Node, arguments, is_view, storage_of

Kind = Literal["appended", "written", "created", "kept", "read"]

_WRITES = frozenset({"_index_put_impl_", "copy_", "index_copy_", "index_put_", "scatter_", "slice_scatter_"})
_SCATTERS = frozenset({"index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"})
# Ops that quantize or dequantize numbers, and ops that reorder a batch.
SCALED = frozenset({
    *COPIES, "__rshift__", "add", "bitwise_and", "bitwise_right_shift", "clamp", "clamp_max", "clamp_min", "div",
    "index_select", "mul", "roll", "round", "sub", "view_dtype",
})  # fmt: skip
_MAX_STEPS = 16


@attrs.frozen
class Cache:
    """Keys or values that attention reads and that may outlive the program.

    Attributes:
        kind: how the program changes the cache. `appended`: it extends an earlier cache. `written`: it writes into an
            earlier buffer. `created`: it makes a new cache. `kept`: the value outlives the program for another reason.
            `read`: the cache is an input that the program does not write.
        values: ids of the cache's values before and after the program.
        nodes: ids of the ops that write the cache.
        quantised: True if the cache has fewer bits than the operand of attention.
    """

    kind: Kind
    values: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    quantised: bool = False

    @property
    def is_older_than_program(self) -> bool:
        """True if the cache existed before the program."""
        return self.kind in {"appended", "written", "read"}

    @property
    def grows(self) -> bool:
        """True if the program adds entries to the cache."""
        return self.kind in {"appended", "written", "created"}


@attrs.define
class Caches:
    """All possible caches in a graph.

    Attributes:
        graph: the graph.
        outliving: values that outlive the program, by storage.
        by_storage: caches by storage.
        by_source: quantized caches, by the node whose result they store.
        new_buffers: values that the program writes into a storage, by storage. The program allocates the storage, and the
            storage does not outlive it.
    """

    graph: Graph
    outliving: dict[int, list[int]] = attrs.field(init=False, factory=dict)
    by_storage: dict[int, Cache] = attrs.field(init=False, factory=dict)
    by_source: dict[int, Cache] = attrs.field(init=False, factory=dict)
    new_buffers: dict[int, list[int]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for value in self.graph.outputs:
            self.outliving.setdefault(storage_of(value), []).append(value)
        for cache in (*self._concatenated_caches(), *self._scattered_caches(), *self._buffer_caches()):
            for value in cache.values:
                self.by_storage.setdefault(storage_of(value), cache)
        self.by_source.update(self._quantized_caches())

    def _nodes_of(self, operations: frozenset[str]) -> Iterator[Node]:
        for operation in operations & self.graph.by_op.keys():
            yield from (self.graph.nodes[i] for i in self.graph.by_op[operation])

    def _concatenated_caches(self) -> Iterator[Cache]:
        """Yield the caches that `cat` ops make or extend. A part of the op's result must outlive the program."""
        for node in self._nodes_of(frozenset({"cat"})):
            surviving = (
                self.outliving.get(storage_of(node.outputs[0])) if node.outputs else None
            )  # `out=` makes no value
            parts = self.parts(node) if surviving else []
            if not surviving or not parts:
                continue
            first, earlier = self._earlier_cache(node)
            input_cache = self.input_behind(first)
            values = (*[v for cat in earlier for v in cat.outputs], node.outputs[0], *surviving)
            nodes = tuple(sorted((*[cat.id for cat in earlier], node.id)))
            is_narrow = self.is_quantized(node.outputs[0])
            if input_cache is not None and len(parts) > 1:
                yield Cache("appended", _unique(input_cache, *values), nodes, is_narrow)
            elif len(parts) == 1 or earlier:
                yield Cache("created", _unique(*values), nodes, is_narrow)

    def _earlier_cache(self, node: Node) -> tuple[int, list[Node]]:
        """Return the cache that the `cat` `node` extends, and the earlier `cat` ops of this program that extended it."""
        earlier: list[Node] = []
        axis = self._axis(node)
        value = next(v for v in node.inputs if self.graph.meta(v).numel)
        while (cat := self._extended_cat(value)) is not None and self._axis(cat) == axis:
            earlier.append(cat)
            value = self.parts(cat)[0]
        return value, earlier

    def _axis(self, cat: Node) -> int:
        dim = arguments(cat).get("dim", 0)
        return dim % len(self.graph.meta(cat.outputs[0]).shape) if isinstance(dim, int) else 0

    def _extended_cat(self, value: int) -> Node | None:
        """Return the `cat` whose result `value` views or copies, or None if there is none or its result outlives the program."""
        for _ in range(_MAX_STEPS):
            node = self.graph.producer(value)
            if node is None or not node.inputs or not (is_view(node) or node.operation in COPIES | {"cat"}):
                return None
            if node.operation == "cat":
                return None if storage_of(node.outputs[0]) in self.outliving else node
            value = node.inputs[0]
        return None

    def parts(self, node: Node) -> list[int]:
        """Return the non-empty operands of a `cat`. If the first is a `cat` of one part, return this part instead."""
        parts = [v for v in node.inputs if self.graph.meta(v).numel]
        if len(parts) > 1:
            producer = self.graph.producer(parts[0])
            if (
                producer is not None and producer.operation == "cat"
            ):  # with an empty tensor: it returns the cache unchanged
                inner_parts = self.parts(producer)
                return [inner_parts[0], *parts[1:]] if len(inner_parts) == 1 else parts
        return parts

    def _scattered_caches(self) -> Iterator[Cache]:
        for node in self._nodes_of(_SCATTERS):
            surviving = self.outliving.get(storage_of(node.outputs[0])) if node.outputs else None
            if surviving is None:
                continue
            input_cache = self.input_behind(node.inputs[0])
            first = (input_cache,) if input_cache is not None else ()
            kind: Kind = "created" if input_cache is None else "written"
            is_narrow = self.is_quantized(node.outputs[0])
            yield Cache(kind, _unique(*first, node.outputs[0], *surviving), (node.id,), is_narrow)

    def _buffer_caches(self) -> Iterator[Cache]:
        """Yield buffers that the program writes in place, if they are inputs or outlive the program."""
        writers: dict[int, list[Node]] = {}
        for node in self._nodes_of(_WRITES):
            for value in node.writes:
                writers.setdefault(storage_of(value), []).append(node)
        for storage, nodes in writers.items():
            first = self._view_base(nodes[0].writes[0])
            surviving, is_input = self.outliving.get(storage, []), self.graph.producer(first) is None
            if is_input or surviving:
                kind: Kind = "written" if is_input else "created"
                ids = tuple(sorted(n.id for n in nodes))
                yield Cache(kind, _unique(first, *surviving), ids, self.is_quantized(first))
            else:
                self.new_buffers[storage] = [node.inputs[-1] for node in nodes]

    def _view_base(self, value: int) -> int:
        """Return the base of the view `value`, or `value` itself if it is no view."""
        for _ in range(_MAX_STEPS):
            node = self.graph.producer(value)
            if node is None or not node.inputs or not is_view(node):
                break
            value = node.inputs[0]
        return value

    def _quantized_caches(self) -> Iterator[tuple[int, Cache]]:
        """Yield pairs of a node and the quantized cache that outlives the program and stores the node's result."""
        for storage, surviving in self.outliving.items():
            if storage in self.by_storage or not self.is_quantized(surviving[0]):
                continue
            source = self.graph.flow.source(surviving[0])
            for _ in range(_MAX_STEPS):
                node = self.graph.flow.node(source)
                if node is None:
                    break
                yield source, Cache("created", tuple(surviving), quantised=True)
                if node.operation not in SCALED:
                    break
                source = self.graph.flow.operands(node)[0]

    def input_behind(self, value: int) -> int | None:
        """Return the program input of which `value` is a view or a dequantized copy, or None."""
        for _ in range(_MAX_STEPS):
            node = self.graph.producer(value)
            if node is None:
                return value
            if not node.inputs or not (node.operation in SCALED or is_view(node)):
                return None
            full_numel, quantized_numel = self.graph.meta(node.inputs[0]).numel, self.graph.meta(value).numel
            if node.operation == "expand" and quantized_numel > full_numel:
                return None  # all samples share the input: it is a weight, such as learnt tokens
            value = node.inputs[0]
        return None

    def is_quantized(self, value: int) -> bool:
        """True if a value is quantized to at most 8 bits."""
        dtype = self.graph.meta(value).dtype
        return dtype.itemsize == 1 and dtype is not torch.bool


def _unique(*values: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
