"""Decoder of quantized GGUF tensors, which runs while a file is read."""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
import torch

from djinn.hooks import Decoding, WeightFile

_BLOCKS: Final = 32 << 10  # number of blocks in memory at a time, about a megabyte, in addition to the result


@attrs.frozen
class Q8_0(Decoding):  # noqa: N801 - its name
    """Decoder of the GGUF type Q8_0: blocks with a scale (float16) and 32 eight-bit integers.

    A scale times an integer needs up to 19 bits. So the result is float32, because float16 would round or overflow.

    Attributes:
        elements, nbytes: number of elements and bytes of a block.
        start: offset of the first block in the file, in bytes.
    """

    elements: ClassVar[int] = 32  # elements of a block
    nbytes: ClassVar[int] = 34

    start: int

    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the decoded tensor from byte `first` on."""
        block_bytes = self.elements * 4  # bytes of a block's results
        begin, end = first // block_bytes, -(-(first + len(buffer)) // block_bytes)
        output = torch.frombuffer(buffer, dtype=torch.uint8)
        for block in range(begin, end, _BLOCKS):
            count = min(_BLOCKS, end - block)
            blocks = torch.empty(count, self.nbytes, dtype=torch.uint8)
            file.read_into(self.start + block * self.nbytes, blocks.flatten().numpy().data)
            scales = blocks[:, :2].contiguous().view(torch.float16).float()
            numbers = blocks[:, 2:].view(torch.int8).float().mul_(scales).view(torch.uint8).flatten()
            offset = block * block_bytes - first  # offset of these results in the buffer
            part = numbers[max(0, -offset) : len(buffer) - offset]
            output[max(0, offset) :][: len(part)] = part
