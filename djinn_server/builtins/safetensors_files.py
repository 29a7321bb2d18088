"""The built-in weight format `safetensors`: names, dtypes, shapes and positions of the tensors in a file.

The format (https://huggingface.co/docs/safetensors) is: eight bytes with the length of the header, the header in JSON,
the bytes of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Final

import msgspec
import torch

from djinn_core.hookspecs import hookimpl
from djinn_core.ir.stored_tensor import SAFETENSORS_DTYPES
from djinn_server.hookspecs.weight_formats import FileHeader, HeaderEntry, WeightFormat
from djinn_server.hookspecs.weight_sources import WeightFile
from djinn_server.weights.headers import MAX_DIMENSIONS, read_bytes, refuse_overlaps

djinn_api_version = "2.0"

HEADER_LIMIT: Final = 100 << 20  # bytes; the limit of the library `safetensors`
LENGTH_BYTES: Final = 8  # size of the length field at the start of a file
DTYPE_NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Number, ...]
    data_offsets: tuple[_Number, _Number]


_header: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry: msgspec.json.Decoder[_Entry] = msgspec.json.Decoder(_Entry)
_metadata: msgspec.json.Decoder[dict[str, str]] = msgspec.json.Decoder(dict[str, str])


class Safetensors(WeightFormat):
    """The weight format safetensors."""

    name = "safetensors"
    suffixes = (".safetensors",)

    def read_header(self, file: WeightFile) -> FileHeader:
        """Read and check the header of a file, as `WeightFormat.read_header` does."""
        return read_header(file.size, partial(read_bytes, file))


def read_header(size: int, read: Callable[[int, int], bytes]) -> FileHeader:
    """Read and check the header of a file.

    Args:
        size: bytes of the file.
        read: `read(start, count)` returns `count` bytes from byte `start`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in the safetensors format, or its tensors overlap, exceed the file or do not match
            their shapes.
    """
    if size < LENGTH_BYTES:
        raise ValueError("the file is shorter than the length of its header")
    length = int.from_bytes(read(0, LENGTH_BYTES), "little")
    if length > min(HEADER_LIMIT, size - LENGTH_BYTES):
        raise ValueError(f"the header of {length:,} bytes exceeds the file or the limit of {HEADER_LIMIT:,} bytes")
    raw = _header.decode(read(LENGTH_BYTES, length))
    metadata = _metadata.decode(raw.pop("__metadata__")) if "__metadata__" in raw else {}
    begin = LENGTH_BYTES + length
    tensors = {name: _decoded_entry(name, _entry.decode(entry), begin, size) for name, entry in raw.items()}
    refuse_overlaps(tensors)
    return FileHeader(tensors, metadata)


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors, in this order.

    Raises:
        ValueError: the format lacks the dtype of a tensor, or the header is too long.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        dtype_name = DTYPE_NAMES.get(dtype)
        if dtype_name is None or name == "__metadata__":
            raise ValueError(
                f"the safetensors format does not support {dtype}"
                if dtype_name is None
                else f"a tensor must not be named {name!r}"
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % LENGTH_BYTES)  # aligns the tensors
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"the header takes {len(text):,} bytes; the limit is {HEADER_LIMIT:,}: shorten names")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _decoded_entry(name: str, entry: _Entry, begin: int, size: int) -> HeaderEntry:
    dtype = SAFETENSORS_DTYPES.get(entry.dtype)
    first, end = entry.data_offsets
    if not first <= end <= size - begin:
        raise ValueError(f"the tensor {name!r} exceeds the file")
    expected_bytes = math.prod(entry.shape) * dtype.itemsize if dtype is not None else end - first
    if len(entry.shape) > MAX_DIMENSIONS or expected_bytes != end - first:
        raise ValueError(f"the shape of the tensor {name!r} does not fit its {end - first} bytes")
    stored_as = "" if dtype is not None else entry.dtype
    return HeaderEntry(dtype, entry.shape, begin + first, end - first, stored_as)


@hookimpl
def djinn_register_weight_formats() -> Iterable[WeightFormat]:
    """Return the weight format `safetensors`."""
    return [Safetensors()]
