"""Whether what attention reads is a cache: where it came from, and whether it outlives the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from djinn.dataflow import COPIES, chain, origin
from djinn.hooks import Graph, Node, storage_of

Kind = Literal["appended", "written", "created", "kept", "read"]

# Between a cache and the attention that reads it: repeating for the query heads, scaling, views and copies.
_PASSED = frozenset({*COPIES, "index_select", "repeat", "repeat_interleave", "mul", "div"})
_WRITES = frozenset({"_index_put_impl_", "copy_", "index_copy_", "index_put_", "scatter_", "slice_scatter_"})
_SCATTERS = frozenset({"index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"})


@attrs.frozen
class Cache:
    """A value that attention reads and that is, or may be, kept from one step to the next.

    Attributes:
        kind: `appended` to a cache from before, `written` into a buffer from before, `created` here as a cache,
            `kept` for whatever reason, or only `read` from outside.
        values: everything that is the cache: what came in, and what is left.
        nodes: ids of the ops that write it.
    """

    kind: Kind
    values: tuple[int, ...]
    nodes: tuple[int, ...] = ()

    @property
    def from_before(self) -> bool:
        """Whether the program found it rather than made it."""
        return self.kind in {"appended", "written", "read"}


@attrs.define
class Surroundings:
    """What the graph says about storages: which are kept, and who writes them."""

    graph: Graph
    kept: dict[int, list[int]] = attrs.field(init=False, factory=dict)
    writers: dict[int, list[Node]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        for value in self.graph.outputs:
            self.kept.setdefault(storage_of(value), []).append(value)
        for operation in _WRITES:
            for i in self.graph.by_op.get(operation, ()):
                node = self.graph.nodes[i]
                for value in node.writes:
                    self.writers.setdefault(storage_of(value), []).append(node)

    def cache(self, value: int) -> Cache | None:
        """The cache that `value`, a key or value operand of attention, was read from, or None."""
        path = list(chain(self.graph, value, _PASSED))
        first = path[-1]
        node = self.graph.producer(first)
        if node is not None and node.operation == "cat":
            return self._grown(node, first)
        if node is not None and node.operation in _SCATTERS:
            return self._scattered(node, first)
        return self._buffer(path, first, node)

    def _grown(self, node: Node, result: int) -> Cache | None:
        left = self.kept.get(storage_of(result))
        parts = self._parts(node)
        if left is None or not parts:
            return None
        before = origin(self.graph, parts[0])
        while (maker := self.graph.producer(before)) is not None and maker.operation == "cat":
            if len(again := self._parts(maker)) != 1:
                break
            before = origin(self.graph, again[0])  # `cat` with nothing: a cache handed over
        if len(parts) > 1 and self.graph.producer(before) is None:
            return Cache("appended", tuple(dict.fromkeys((before, result, *left))), (node.id,))
        return Cache("created", tuple(dict.fromkeys((result, *left))), (node.id,)) if len(parts) == 1 else None

    def _parts(self, node: Node) -> list[int]:
        """What a `cat` puts together; an empty tensor is how many programs spell "nothing yet"."""
        return [v for v in node.inputs if self.graph.meta(v).numel]

    def _scattered(self, node: Node, result: int) -> Cache | None:
        before, left = origin(self.graph, node.inputs[0]), self.kept.get(storage_of(result))
        if left is None:
            return None
        kind: Kind = "written" if self.graph.producer(before) is None else "created"
        return Cache(kind, tuple(dict.fromkeys((before, result, *left))), (node.id,))

    def _buffer(self, path: Iterable[int], first: int, node: Node | None) -> Cache | None:
        nodes = tuple(n.id for n in self.writers.get(storage_of(first), ()))
        left = self.kept.get(storage_of(first), [])
        if node is None:
            return Cache("written" if nodes else "read", tuple(dict.fromkeys((first, *left))), nodes)
        if nodes and left:
            return Cache("created", tuple(dict.fromkeys((first, *left))), nodes)
        held = [v for v in path if v in left]
        return Cache("kept", tuple(held)) if held else None
