"""Header of a file with weights, whatever its format: the tensors, and how each is read."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch

from djinn_core.hookspecs.weights import WeightFile
from djinn_core.wire.tensors import dtype_name


class Decoding(Protocol):
    """Makes a tensor's contents from bytes of the file that are not these contents one after another."""

    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents of the contiguous tensor from byte `first` on.

        Raises:
            OSError: the file cannot be read.
        """


@attrs.frozen
class HeaderEntry:
    """A tensor in a file.

    Attributes:
        dtype: of what is read; None: it cannot be read.
        shape: its sizes.
        start: the byte of the file where its contents begin, if there is no `decoding`.
        size: bytes of its contents as they are read.
        stored_as: the format's name for what it is stored as, where it cannot be read.
        decoding: how its contents are made from the file; None: they lie in it as they are.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    size: int
    stored_as: str = ""
    decoding: Decoding | None = None

    @property
    def dtype_name(self) -> str:
        """Name of its dtype in messages; that of the format where it cannot be read."""
        return self.stored_as if self.dtype is None else dtype_name(self.dtype)

    def read_into(self, file: WeightFile, first: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents of the contiguous tensor from byte `first` on.

        Raises:
            OSError: the file cannot be read.
        """
        if self.decoding is None:
            file.read_into(self.start + first, buffer)
        else:
            self.decoding.read_into(file, first, buffer)


@attrs.frozen
class FileHeader:
    """Contents of a header: tensors by name, and what the file says of itself."""

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]


def read_bytes(file: WeightFile, start: int, size: int) -> bytes:
    """So many bytes of a file.

    Raises:
        OSError: it cannot be read.
    """
    data = bytearray(size)
    file.read_into(start, memoryview(data))
    return bytes(data)


def refuse_overlaps(tensors: dict[str, HeaderEntry]) -> None:
    """Check that no two tensors have bytes in common.

    Raises:
        ValueError: two have.
    """
    end = 0
    for name, one in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if one.start < end:
            raise ValueError(f"its tensor {name!r} overlaps another")
        end = one.start + one.size
