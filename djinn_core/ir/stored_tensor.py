"""A tensor, or a part of one, in a file that an executor reads itself."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final

import msgspec
import torch

# By their names in safetensors files the dtypes that have whole bytes; a file may name others (F4, F6_E2M3), which PyTorch has no tensors of.
SAFETENSORS_DTYPES: Final = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
)


class StoredTensor(msgspec.Struct, frozen=True):
    """A reference to stored bytes, which are read as a new contiguous tensor.

    Attributes:
        address: where the executor opened the files.
        version: version of the files; others than these are not read.
        name: the tensor's name in them.
        dtype, shape: of what is read.
        start: byte of the tensor's contents at which that begins.
    """

    address: str
    version: bytes
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is read."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, first: int, end: int) -> StoredTensor:
        """The rows `first` to `end` of the first dimension."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return msgspec.structs.replace(self, shape=(end - first, *self.shape[1:]), start=self.start + first * row)


class WeightListing(msgspec.Struct, frozen=True):
    """The tensors at an address, as an executor found them.

    Attributes:
        tensors: by name, in the order of the files.
        metadata: what the files say of themselves.
        unreadable: names of the formats that no tensor can be made of, such as `Q4_K`, by the names of the tensors that have them.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    unreadable: dict[str, str] = msgspec.field(default_factory=dict)
