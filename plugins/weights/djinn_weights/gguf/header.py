"""Header of a GGUF file: names, types, shapes and offsets of its tensors.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: metadata keys with values, then a
description of each tensor with its offset, then the tensors' bytes. The dimension that varies fastest comes first,
unlike in PyTorch.
"""

from __future__ import annotations

import math
import struct
from types import MappingProxyType
from typing import Final

import torch

from djinn.hooks import FileHeader, HeaderEntry, WeightFile
from djinn.weights import read_bytes
from djinn_server.weights.headers import MAX_DIMENSIONS, MAX_TENSORS, refuse_overlaps
from djinn_weights.gguf.quantized import Q8_0

HEADER_LIMIT: Final = 100 << 20  # in bytes
VALUES: Final = 4_000_000  # maximum number of metadata values in a header. Most are words of a vocabulary.
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32
_DEPTH: Final = 4  # maximum nesting of lists
_FIRST_CHUNK, _MAX_CHUNK = 64 << 10, 4 << 20

# Types of values by their numbers.
_NUMBERS: Final = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<?"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)
_TEXT, _LIST = 8, 9
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]

# Types of tensors by their numbers.
_DTYPES: Final = MappingProxyType(
    {
        0: torch.float32,
        1: torch.float16,
        24: torch.int8,
        25: torch.int16,
        26: torch.int32,
        27: torch.int64,
        28: torch.float64,
        30: torch.bfloat16,
    }
)
_Q8_0: Final = 8
_UNREADABLE_TYPES: Final = MappingProxyType(
    {
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
    }
)


def read_gguf(file: WeightFile) -> FileHeader:
    """Read and check the header of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not GGUF version 2 or 3, or its tensors overlap, exceed the file or contradict their shapes.
    """
    reader = _Reader(file)
    if reader.read(4) != _MAGIC:
        raise ValueError(f"{file.name!r} is not a GGUF file")
    version = reader.read_number(_U32)
    if version not in _VERSIONS:
        raise ValueError(
            f"{file.name!r} has GGUF version {version}, or another byte order; versions 2 and 3 can be read"
        )
    tensors, keys = reader.read_number(_U64), reader.read_number(_U64)
    metadata = dict[str, str]()
    alignment = _ALIGNMENT
    for _ in range(reader.checked_count(keys)):
        key = reader.read_text()
        value = reader.read_value(reader.read_number(_U32))
        if value is None:
            continue
        metadata[key] = f"{value}"
        if key == "general.alignment":
            alignment = value if isinstance(value, int) else 0
    if tensors > MAX_TENSORS or not 0 < alignment <= HEADER_LIMIT:
        raise ValueError(f"the file has too many tensors ({tensors:,}), or an invalid alignment ({alignment:,})")
    infos = [_read_tensor_info(reader) for _ in range(tensors)]
    begin = -(-reader.position // alignment) * alignment
    entries = dict[str, HeaderEntry]()
    stored_entries = dict[str, HeaderEntry]()  # tensors as stored in the file, to find overlaps
    for name, shape, kind, offset in infos:
        if name in entries:
            raise ValueError(f"the file has the tensor {name!r} twice")
        entries[name], size = _entry(name, shape, kind, begin + offset, file.size)
        stored_entries[name] = HeaderEntry(None, shape, begin + offset, size)
    refuse_overlaps(stored_entries)
    return FileHeader(entries, metadata)


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.read_text(), reader.read_number(_U32)
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"the tensor {name[:200]!r} has {dimensions} dimensions; the limit is {MAX_DIMENSIONS}")
    sizes = [reader.read_number(_U64) for _ in range(dimensions)]
    return name, tuple(reversed(sizes)), reader.read_number(_U32), reader.read_number(_U64)


def _entry(name: str, shape: tuple[int, ...], kind: int, start: int, end: int) -> tuple[HeaderEntry, int]:
    """Return the header entry of a tensor, and its bytes in the file: 0 if its type is not readable.

    `start`: offset of the tensor in the file. `end`: size of the file. Both are in bytes.
    """
    elements = math.prod(shape)
    dtype = _DTYPES.get(kind)
    if max(elements, *shape, 0) >= 1 << 62 or start > end:
        raise ValueError(f"the tensor {name[:200]!r} is outside of the file")
    if dtype is not None:
        size = elements * dtype.itemsize
        entry = HeaderEntry(dtype, shape, start, size)
    elif kind == _Q8_0 and shape and not shape[-1] % Q8_0.elements:
        size = elements // Q8_0.elements * Q8_0.nbytes
        entry = HeaderEntry(torch.float32, shape, start, elements * 4, decoding=Q8_0(start))
    elif kind in _UNREADABLE_TYPES:
        size = 0
        entry = HeaderEntry(None, shape, start, 0, stored_as=_UNREADABLE_TYPES[kind])
    else:
        raise ValueError(f"the tensor {name[:200]!r} has an unknown type (number {kind})")
    if size > end - start:
        raise ValueError(f"the tensor {name[:200]!r} is outside of the file")
    return entry, size


class _Reader:
    """Sequential reader of a header. It reads the file in chunks of growing size."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._chunk = b""
        self._chunk_offset = 0  # of `_chunk` in the file
        self._next_chunk_size = _FIRST_CHUNK
        self._values_left = VALUES
        self._limit = min(file.size, HEADER_LIMIT)
        self.position = 0

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.position - self._chunk_offset
        if start + count > len(self._chunk) or start < 0:
            self._load(count)
            start = 0
        self.position += count
        return self._chunk[start : start + count]

    def _load(self, count: int) -> None:
        if count > self._limit - self.position:
            raise ValueError("the file ends within its header, or its header is too long")
        size = min(max(count, self._next_chunk_size), self._limit - self.position)
        self._chunk, self._chunk_offset = read_bytes(self._file, self.position, size), self.position
        self._next_chunk_size = min(2 * self._next_chunk_size, _MAX_CHUNK)

    def skip_bytes(self, count: int) -> None:
        """Skip the next `count` bytes."""
        if count > self._limit - self.position:
            raise ValueError("the file ends within its header, or its header is too long")
        self.position += count

    def read_number(self, form: struct.Struct) -> int:
        """Return the next integer, in the binary format `form`."""
        value: int = form.unpack(self.read(form.size))[0]
        return value

    def checked_count(self, count: int) -> int:
        """Return `count`, a number of values in the header, after a check that the header has at most `VALUES` in total."""
        self._values_left -= count
        if self._values_left < 0:
            raise ValueError(f"the header has more than {VALUES:,} values")
        return count

    def read_text(self) -> str:
        """Return the next string."""
        try:
            return self.read(self.read_number(_U64)).decode()
        except UnicodeDecodeError as error:
            raise ValueError("the file has a name or a text that is not UTF-8") from error

    def read_value(self, kind: int, depth: int = 0) -> str | int | float | None:
        """Return the next value of type `kind`, or skip a list and return None. `depth`: nesting level of the value."""
        if kind == _TEXT:
            return self.read(self.read_number(_U64)).decode(errors="replace")
        if kind == _LIST and depth < _DEPTH:
            self._skip_list(depth)
            return None
        form = _NUMBERS.get(kind)
        if form is None:
            raise ValueError(f"the header has a value of an unknown type (number {kind})")
        number: int | float = form.unpack(self.read(form.size))[0]
        return number

    def _skip_list(self, depth: int) -> None:
        kind, count = self.read_number(_U32), self.read_number(_U64)
        if kind in _NUMBERS:
            self.skip_bytes(count * _NUMBERS[kind].size)
            return
        for _ in range(self.checked_count(count)):
            if kind == _TEXT:
                self.skip_bytes(self.read_number(_U64))
            else:
                self.read_value(kind, depth + 1)
