"""References to tensors, or slices of tensors, in files that an executor reads."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final

import msgspec
import torch

# dtypes of whole bytes by their safetensors names. PyTorch has no tensors of the other dtypes (F4, F6_E2M3).
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
    """A reference to stored bytes. Reading it gives a new contiguous tensor.

    Attributes:
        address: address of the files that the executor opened.
        version: version of the files; other versions are not read.
        name: name of the tensor in the files.
        dtype: dtype of the tensor to read.
        shape: shape of the tensor to read.
        start: first byte to read, counted from the start of the stored tensor.
    """

    address: str
    version: bytes
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes to read."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return a reference to the rows `first` to `end` (exclusive) of the first dimension."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return msgspec.structs.replace(self, shape=(end - first, *self.shape[1:]), start=self.start + first * row)


class WeightListing(msgspec.Struct, frozen=True):
    """The tensors that an executor found at an address.

    Attributes:
        tensors: by name, in the order of the files.
        metadata: metadata in the files.
        unreadable: unsupported formats, such as `Q4_K`, by tensor name.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    unreadable: dict[str, str] = msgspec.field(default_factory=dict)
