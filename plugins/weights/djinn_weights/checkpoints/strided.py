"""Strided tensors in a file: elements with gaps or in another order, such as PyTorch saves for transposed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch

from djinn.hooks import Decoding, WeightFile

PIECE: Final = 8 << 20  # maximum bytes of the file in memory, in addition to the result


@attrs.frozen
class StridedElements(Decoding):
    """Decoder of elements with gaps, or in another order than in a contiguous tensor.

    Attributes:
        start: offset of the tensor's first element in the file, in bytes.
        shape, strides: sizes and strides of the tensor, in elements. No two elements overlap.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the decoded tensor from byte `first` on."""
        rows, row_bytes = self.shape[0], self.dtype.itemsize
        for size in self.shape[1:]:
            row_bytes *= size
        begin, end = first // row_bytes, min(rows, -(-(first + len(buffer)) // row_bytes))
        elements = torch.empty((end - begin, *self.shape[1:]), dtype=self.dtype)
        self._fill(elements, file, begin * self.strides[0])
        flat = elements.view(torch.uint8).flatten() if elements.dim() else elements
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(flat[first - begin * row_bytes :][: len(buffer)])

    def _fill(self, to: torch.Tensor, file: WeightFile, first: int) -> None:
        """Fill `to` with elements. A large range is divided into halves.

        `first`: offset of the first element in the file, counted in elements from `start`.
        """
        reach = span_of(to.shape, self.strides)
        if reach * to.itemsize > PIECE:
            # Halves along the largest stride do not overlap, so no byte is read twice.
            split_dim = max(range(to.dim()), key=lambda d: self.strides[d] if to.shape[d] > 1 else -1)
            half = to.shape[split_dim] // 2
            if half:
                self._fill(to.narrow(split_dim, 0, half), file, first)
                second_half = to.narrow(split_dim, half, to.shape[split_dim] - half)
                self._fill(second_half, file, first + half * self.strides[split_dim])
                return
        data = torch.empty(reach * to.itemsize, dtype=torch.uint8)
        file.read_into(self.start + first * to.itemsize, data.numpy().data)
        to.copy_(data.view(to.dtype).as_strided(to.shape, self.strides))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of storage elements from a non-empty tensor's first element to its last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if two elements of a tensor may overlap in memory, as in an expanded tensor.

    The check is conservative: the result may be True for a tensor without overlap.
    """
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False
