"""Run a program in chunks of rows. Each chunk passes through all layers, as a group of ops for one device."""

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
    """Consecutive chunks of rows.

    Attributes:
        ends: end row of each chunk, exclusive.
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
        cut: slice nodes that select rows of the last chunk only.
        full_tensors: tensors with all rows, and tensors without rows, by value.
        parts: the tensor of each chunk, by value.
        masks: attention masks, by chunk and dtype.
    """

    rows: Rows
    chunks: Chunks
    cut: frozenset[int]
    full_tensors: dict[int, torch.Tensor]
    parts: dict[int, list[torch.Tensor]] = attrs.field(factory=dict)
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict)

    def run(self, nodes: Sequence[Node]) -> None:
        """Compute nodes in order. Each node runs once per chunk if possible, otherwise once for all rows."""
        for node in nodes:
            if node.id in self.rows.attention:
                self._attend(node, self.rows.attention[node.id])
            elif node.id in self.rows.splits:
                self._run_by_chunk(node)
            elif node.id in self.cut:
                self.full_tensors[node.outputs[0]] = self._slice_last_chunk(node)
            else:
                results = call_again(node, [self.all_rows(v) for v in node.inputs], {})
                self.full_tensors.update(zip(node.outputs, results, strict=True))

    def all_rows(self, value: int) -> torch.Tensor:
        """Return all rows of a value, on the device of the last chunk."""
        if value not in self.full_tensors:
            with group(len(self.chunks) - 1):
                self.full_tensors[value] = torch.cat(self.parts[value], self.rows.dims[value])
        return self.full_tensors[value]

    def part(self, value: int, chunk: int) -> torch.Tensor:
        """Return the rows of a value for one chunk. If only the full tensor exists, slice it."""
        if value not in self.parts:
            self.parts[value] = [
                self._narrow(self.full_tensors[value], self.rows.dims[value], c) for c in self._chunk_indices
            ]
        return self.parts[value][chunk]

    @property
    def _chunk_indices(self) -> range:
        return range(len(self.chunks))

    def _narrow(self, tensor: torch.Tensor, dim: int, chunk: int) -> torch.Tensor:
        return tensor.narrow(dim, self.chunks.start(chunk), self.chunks.length(chunk))

    def _run_by_chunk(self, node: Node) -> None:
        split, graph = self.rows.splits[node.id], self.rows.graph
        if split.passes_rows:
            operand = next(v for v in node.inputs if v in self.rows.dims)
            self.parts[node.outputs[0]] = [self.part(operand, chunk) for chunk in self._chunk_indices]
            return
        shape = list(graph.meta(node.outputs[0]).shape)
        parts: list[list[torch.Tensor]] = []
        for chunk in self._chunk_indices:
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

        An operand with rows is sliced. An operand that broadcasts is sliced if it has an element for each row.
        """
        if value in self.rows.dims:
            return self.part(value, chunk)
        graph, tensor = self.rows.graph, self.all_rows(value)
        operand_dim = None
        if self.rows.splits[node.id].broadcast:
            operand_dim = aligned_dim(
                graph.meta(value).shape, len(graph.meta(node.outputs[0]).shape), dim, self.rows.rows
            )
        return tensor if operand_dim is None else self._narrow(tensor, operand_dim, chunk)

    def _attend(self, node: Node, attention: CausalAttention) -> None:
        """Compute attention for each chunk. The rows of a chunk attend to all rows up to the end of the chunk."""
        results: list[torch.Tensor] = []
        queries = [self.part(attention.query, c) for c in self._chunk_indices]
        for chunk, query in enumerate(queries):
            with group(chunk):
                key, value = (self._rows_until(v, chunk) for v in (attention.key, attention.value))
                options: Mapping[str, Any] = (
                    {} if not chunk else {"is_causal": False, "attn_mask": self._mask(chunk, query)}
                )
                results += call_again(node, [query, key, value], options)
        self.parts[node.outputs[0]] = results

    def _rows_until(self, value: int, chunk: int) -> torch.Tensor:
        if chunk == len(self.chunks) - 1:
            return self.all_rows(value)
        parts = [self.part(value, c) for c in range(chunk + 1)]
        return torch.cat(parts, self.rows.dims[value]) if chunk else parts[0]

    def _mask(self, chunk: int, query: torch.Tensor) -> torch.Tensor:
        """Return the mask that prevents rows of a chunk from attending to later rows: -inf above the diagonal."""
        key = (chunk, query.dtype)
        if key not in self.masks:
            size = (self.chunks.length(chunk), self.chunks.ends[chunk])
            minus_infinity = torch.full(size, -torch.inf, dtype=query.dtype, device=query.device)
            self.masks[key] = minus_infinity.triu(self.chunks.start(chunk) + 1)
        return self.masks[key]

    def _slice_last_chunk(self, node: Node) -> torch.Tensor:
        """Run the slice `node` on the last chunk instead of on the full tensor."""
        value, last = node.inputs[0], len(self.chunks) - 1
        dim = self.rows.dims[value]
        length = self.rows.graph.meta(node.outputs[0]).shape[dim]
        with group(last):
            return self.part(value, last).narrow(dim, first_row(self.rows, node) - self.chunks.start(last), length)
