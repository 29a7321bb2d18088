"""Run a program in chunks of rows: each chunk passes through all layers, as a group of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.planning import Node, call_again, group
from djinn_optimizations.prefill.rows import CausalAttention, Rows, first_row
from djinn_optimizations.prefill.rules import aligned_dim


@attrs.frozen
class Chunks:
    """Chunks of rows.

    Attributes:
        ends: first row of each chunk, and the end of the last chunk.
    """

    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def start(self, chunk: int) -> int:
        """Return the first row of a chunk."""
        return self.ends[chunk - 1] if chunk else 0

    def length(self, chunk: int) -> int:
        """Return the number of rows of a chunk."""
        return self.ends[chunk] - self.start(chunk)


@attrs.define(eq=False)
class ChunkedRun:
    """One run of the divided part of a program.

    Attributes:
        rows: the divided part.
        chunks: the chunks.
        cut: nodes that select rows of the last chunk only.
        whole: tensors with all rows, by value.
        parts: the tensor of each chunk, by value.
        masks: attention masks, by chunk and dtype.
    """

    rows: Rows
    chunks: Chunks
    cut: frozenset[int]
    whole: dict[int, torch.Tensor]
    parts: dict[int, list[torch.Tensor]] = attrs.field(factory=dict)
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict)

    def run(self, nodes: Sequence[Node]) -> None:
        """Compute nodes in order. Each node runs once per chunk if possible, and else for all rows."""
        for node in nodes:
            if node.id in self.rows.attention:
                self._attend(node, self.rows.attention[node.id])
            elif node.id in self.rows.splits:
                self._divide(node)
            elif node.id in self.cut:
                self.whole[node.outputs[0]] = self._cut_out(node)
            else:
                results = call_again(node, [self.all_of(v) for v in node.inputs], {})
                self.whole.update(zip(node.outputs, results, strict=True))

    def all_of(self, value: int) -> torch.Tensor:
        """Return all rows of a value, on the device of the last chunk."""
        if value not in self.whole:
            with group(len(self.chunks) - 1):
                self.whole[value] = torch.cat(self.parts[value], self.rows.dims[value])
        return self.whole[value]

    def part(self, value: int, chunk: int) -> torch.Tensor:
        """Return the rows of a value for one chunk. A tensor with all rows is sliced on its own device."""
        if value not in self.parts:
            self.parts[value] = [self._narrow(self.whole[value], self.rows.dims[value], c) for c in self._numbers]
        return self.parts[value][chunk]

    @property
    def _numbers(self) -> range:
        return range(len(self.chunks))

    def _narrow(self, tensor: torch.Tensor, dim: int, chunk: int) -> torch.Tensor:
        return tensor.narrow(dim, self.chunks.start(chunk), self.chunks.length(chunk))

    def _divide(self, node: Node) -> None:
        split, graph = self.rows.splits[node.id], self.rows.graph
        if split.passes:
            before = next(v for v in node.inputs if v in self.rows.dims)
            self.parts[node.outputs[0]] = [self.part(before, chunk) for chunk in self._numbers]
            return
        shape = list(graph.meta(node.outputs[0]).shape)
        parts: list[list[torch.Tensor]] = []
        for chunk in self._numbers:
            options: dict[str, Any] = {}
            if split.sizes:
                sizes = [*shape[: split.dims[0]], self.chunks.length(chunk), *shape[split.dims[0] + 1 :]]
                options = {split.sizes: sizes}
            operands = [self._operand(node, v, split.dims[0], chunk) for v in node.inputs]
            with group(chunk):
                parts.append(call_again(node, operands, options))
        for index, value in enumerate(node.outputs):
            self.parts[value] = [results[index] for results in parts]

    def _operand(self, node: Node, value: int, dim: int, chunk: int) -> torch.Tensor:
        """Return the operand of an op for one chunk.

        An operand with rows is sliced, and so is an operand that broadcasts against one.
        """
        if value in self.rows.dims:
            return self.part(value, chunk)
        graph, tensor = self.rows.graph, self.all_of(value)
        at = None
        if self.rows.splits[node.id].broadcast:
            at = aligned_dim(graph.meta(value).shape, len(graph.meta(node.outputs[0]).shape), dim, self.rows.rows)
        return tensor if at is None else self._narrow(tensor, at, chunk)

    def _attend(self, node: Node, attention: CausalAttention) -> None:
        """Compute attention for each chunk. The rows of a chunk attend to all rows up to the end of the chunk."""
        results: list[torch.Tensor] = []
        names = [self.part(attention.query, c) for c in self._numbers]
        for chunk, query in enumerate(names):
            with group(chunk):
                key, value = (self._up_to(v, chunk) for v in (attention.key, attention.value))
                options: Mapping[str, Any] = (
                    {} if not chunk else {"is_causal": False, "attn_mask": self._mask(chunk, query)}
                )
                results += call_again(node, [query, key, value], options)
        self.parts[node.outputs[0]] = results

    def _up_to(self, value: int, chunk: int) -> torch.Tensor:
        if chunk == len(self.chunks) - 1:
            return self.all_of(value)
        before = [self.part(value, c) for c in range(chunk + 1)]
        return torch.cat(before, self.rows.dims[value]) if chunk else before[0]

    def _mask(self, chunk: int, query: torch.Tensor) -> torch.Tensor:
        """Return the mask for a chunk's attention scores, which prevents rows from attending to later rows."""
        key = (chunk, query.dtype)
        if key not in self.masks:
            size = (self.chunks.length(chunk), self.chunks.ends[chunk])
            never = torch.full(size, -torch.inf, dtype=query.dtype, device=query.device)
            self.masks[key] = never.triu(self.chunks.start(chunk) + 1)
        return self.masks[key]

    def _cut_out(self, node: Node) -> torch.Tensor:
        """Select rows from the last chunk instead of from the whole tensor."""
        value, last = node.inputs[0], len(self.chunks) - 1
        dim = self.rows.dims[value]
        length = self.rows.graph.meta(node.outputs[0]).shape[dim]
        with group(last):
            return self.part(value, last).narrow(dim, first_row(self.rows, node) - self.chunks.start(last), length)
